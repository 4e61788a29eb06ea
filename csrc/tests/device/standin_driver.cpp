// libcuda over the simulator: the calls that CUDA's runtime library does not have.
#include "standin.h"

extern "C" {

int cuStreamWaitValue32_v2(void* stream, unsigned long long address, std::uint32_t value, unsigned flags) {
  standin::note("cuStreamWaitValue32_v2");
  if (flags != 0) return 1;
  return standin::wait_value(stream, reinterpret_cast<const void*>(address), value);
}

int cuStreamWriteValue32_v2(void* stream, unsigned long long address, std::uint32_t value, unsigned flags) {
  standin::note("cuStreamWriteValue32_v2");
  if (flags != 0) return 1;
  return standin::write_value(stream, reinterpret_cast<void*>(address), value);
}

int cuDeviceGet(int* device, int index) {
  standin::note("cuDeviceGet");
  *device = index;
  return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  standin::note("cuDevicePrimaryCtxGetState");
  *flags = 0;
  *active = static_cast<int>(standin::contexts().count(device));
  return 0;
}

int cuDeviceGetUuid_v2(unsigned char* bytes, int device) {
  standin::note("cuDeviceGetUuid_v2");
  return standin::device_uuid(bytes, device);
}

}  // extern "C"
