// Hopper's own instructions, each in a small function: barriers in shared memory, tensor copies, warpgroup products.
// Shared memory is given by 32-bit addresses, since a pointer would take two registers.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace rlk {

// --- clusters and barriers -------------------------------------------------------------------------------------------

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// threadIdx.x, read anew each time so that no register keeps it.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// The number of this warp in the block, in a form that the compiler knows to be the same in all threads of the warp.
__device__ __forceinline__ int warp_index() { return __shfl_sync(0xffffffff, thread_index() / 32, 0); }

// Waits for all threads of all blocks of the cluster.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialised barriers visible to the cluster and to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The one arrival of a producer at a barrier, which also sets how many bytes the phase waits for.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives at the barrier that is at the same address in block `rank` of the cluster. It hands over nothing that
// ordinary stores have written, so that the default order suffices; a wider one would cost a fence.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 10000000;\n"
      "@done bra.uni DONE;\n"
      "bra.uni AGAIN;\n"
      "DONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- copies ----------------------------------------------------------------------------------------------------------

// Loads one box of a tensor map into the shared memory of every block in `mask`, at the same address; each block's
// barrier counts its bytes.
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, int inner, int outer, uint32_t barrier,
                                         uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(inner), "r"(outer), "r"(barrier), "h"(mask)
      : "memory");
}

__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, int inner, int outer, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(inner), "r"(outer), "r"(barrier)
      : "memory");
}

// Stores one box from shared memory into a tensor map, which cuts off what lies outside.
__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t from, int inner, int outer) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(inner),
               "r"(outer), "r"(from)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the last `kInFlight` boxes that this thread stored have left shared memory.
template <int kInFlight>
__device__ __forceinline__ void stores_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kInFlight) : "memory");
}

// Makes what this thread wrote into shared memory visible to the copy engine.
__device__ __forceinline__ void stores_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Stores four 8 × 8 matrices of 16-bit values, which come in pairs as an accumulator holds them. Each lane gives the
// address of the 16 bytes of one matrix row.
__device__ __forceinline__ void store_matrices(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t from) {
  uint4 found;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
               : "r"(from)
               : "memory");
  return found;
}

// --- registers and arithmetic ----------------------------------------------------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^x that keeps subnormal results, for values of which a row has only a few.
__device__ __forceinline__ float exp2_full(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float divide(float x, float y) {
  float z;
  asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ __forceinline__ float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The maximum, which unlike that of fmaxf is NaN where either is NaN.
__device__ __forceinline__ float max_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ __forceinline__ float min_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// Loads a value that exists, else gives 0, without a branch: around one ptxas would serialise the products that add to
// what was loaded.
__device__ __forceinline__ float load_or_zero(const float* from, bool exists) {
  float found;
  asm volatile(
      "{\n.reg .pred exists;\nsetp.ne.b32 exists, %2, 0;\n"
      "mov.f32 %0, 0f00000000;\n@exists ld.global.f32 %0, [%1];\n}"
      : "=f"(found)
      : "l"(from), "r"(static_cast<int>(exists)));
  return found;
}

// --- products --------------------------------------------------------------------------------------------------------

// The descriptor of a warpgroup product's operand in shared memory: rows of 128 bytes under the 128-byte swizzle, eight
// rows to 1024 bytes. Where K does not run along these rows, `next_block` is the distance in bytes to the next 64 rows
// or columns of the operand; where it does, `next_block` is ignored.
__device__ __forceinline__ uint64_t operand(uint32_t start, int next_block) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kNextEightRows = 1024 >> 4;
  return kSwizzle128 | kNextEightRows << 32 | static_cast<uint64_t>(next_block >> 4) << 16 |
         (start >> 4 & 0x3FFF);
}

__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kInFlight>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kInFlight) : "memory");
}

// Tells the compiler that accumulators change here, which it cannot see.
template <int kCount>
__device__ __forceinline__ void changed(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

#define RLK_R4 "%0, %1, %2, %3"
#define RLK_R8 RLK_R4 ", %4, %5, %6, %7"
#define RLK_R16 RLK_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define RLK_R32 RLK_R16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define RLK_R64                                                                                                      \
  RLK_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51"      \
          ", %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define RLK_R128                                                                                                     \
  RLK_R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83"      \
          ", %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103"  \
          ", %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120"    \
          ", %121, %122, %123, %124, %125, %126, %127"
#define RLK_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define RLK_D8(d, i) RLK_D4(d, i), RLK_D4(d, i + 4)
#define RLK_D16(d, i) RLK_D8(d, i), RLK_D8(d, i + 8)
#define RLK_D32(d, i) RLK_D16(d, i), RLK_D16(d, i + 16)
#define RLK_D64(d, i) RLK_D32(d, i), RLK_D32(d, i + 32)
#define RLK_D128(d, i) RLK_D64(d, i), RLK_D64(d, i + 64)

// d += A·B, or d = A·B without `adds`, for 64 rows, COLUMNS columns and a K of 16; there are half as many REGISTERS as
// columns. An operand is transposed when K does not run along its 128-byte rows. A, B, ADDS, TA and TB are the numbers
// that the asm statement's operands behind d have.
#define RLK_MULTIPLY(COLUMNS, REGISTERS, TYPE, NAME, A, B, ADDS, TA, TB)                                                   \
  template <bool kTransposeA, bool kTransposeB>                                                                      \
  __device__ __forceinline__ void multiply_add(float (&d)[REGISTERS], TYPE, uint64_t a, uint64_t b, bool adds) {     \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" ADDS ", 0;\n"                                            \
                 "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." NAME "." NAME " {" RLK_R##REGISTERS "}, %" A\
                 ", %" B ", adds, 1, 1, %" TA ", %" TB ";\n}"                                                        \
                 : RLK_D##REGISTERS(d, 0)                                                                            \
                 : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(kTransposeA), "n"(kTransposeB));                 \
  }
#define RLK_MULTIPLY_BOTH(COLUMNS, REGISTERS, A, B, ADDS, TA, TB)               \
  RLK_MULTIPLY(COLUMNS, REGISTERS, __nv_bfloat16, "bf16", A, B, ADDS, TA, TB)   \
  RLK_MULTIPLY(COLUMNS, REGISTERS, __half, "f16", A, B, ADDS, TA, TB)

RLK_MULTIPLY_BOTH(8, 4, "4", "5", "6", "7", "8")
RLK_MULTIPLY_BOTH(16, 8, "8", "9", "10", "11", "12")
RLK_MULTIPLY_BOTH(32, 16, "16", "17", "18", "19", "20")
RLK_MULTIPLY_BOTH(64, 32, "32", "33", "34", "35", "36")
RLK_MULTIPLY_BOTH(128, 64, "64", "65", "66", "67", "68")
RLK_MULTIPLY_BOTH(256, 128, "128", "129", "130", "131", "132")

#undef RLK_MULTIPLY_BOTH
#undef RLK_MULTIPLY

}  // namespace rlk
