// Asks a handler for what XLA asks before it registers the handler: its FFI version and its traits.
#include "xla/ffi/api/c_api.h"

extern "C" int metadata(XLA_FFI_Handler* handler, int* version, unsigned* traits) {
  XLA_FFI_Metadata found = {};
  found.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  found.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension = {};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &found;
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.extension_start = &extension.extension_base;
  if (handler(&frame) != nullptr) return 1;
  *version = found.api_version.major_version * 1000 + found.api_version.minor_version;
  *traits = found.traits;
  return 0;
}
