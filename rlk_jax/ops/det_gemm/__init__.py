"""det_gemm: a matrix product whose rows have the same bits in any batch. api.py has the public function."""
