// A CUDA device that exists only for fake tensors. Autograd asks two objects about it: the device guard, which streams,
// events and device threads go through, and the hooks, which say whether a build has CUDA. Both are replaced by ones
// that do nothing. Neither is ever destroyed, so nothing is left to crash when the process ends.
#include <new>

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::EventFlag;
using c10::Stream;

const Device kDevice{DeviceType::CUDA, 0};

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, kDevice); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, DeviceIndex, EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

struct FakeHooks final : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
};

static_assert(sizeof(FakeHooks) == sizeof(at::CUDAHooksInterface), "hooks without members can take each other's place");

}  // namespace

extern "C" void stepscope_enable_fake_cuda() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(new FakeGuard());
  // The hooks are a static object of PyTorch, which made it while it was imported; only its type changes.
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) FakeHooks();
}
