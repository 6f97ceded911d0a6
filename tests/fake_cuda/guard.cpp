// A CUDA device guard and CUDA hooks that do nothing.
//
// PyTorch without CUDA has neither, and asks for them before it runs anything on device "cuda": autograd wants the
// device's stream, autocast and device properties want the hooks. With these, FakeTensorMode runs forward and backward
// passes on "cuda" without a GPU. Tensors have shapes, types and devices, and no values.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

struct NoOpGuard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device device) const override { return defaultStream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return defaultStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return defaultStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}

  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}

 private:
  static c10::Stream defaultStream(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }
};

NoOpGuard guard;
c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);

}  // namespace

struct NoOpHooks final : public at::CUDAHooksInterface {
  explicit NoOpHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

namespace at {
using CUDAHooks = ::NoOpHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
