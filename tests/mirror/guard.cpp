// A CPU build of torch has no device guard for "cuda", without which conversions and slices of such tensors fail.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA,
                                          new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
}
