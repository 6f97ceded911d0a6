// Device "cuda" without a GPU, with values: memory of the host, and kernels of the CPU. Above the kernels all is as on a
// GPU: Python, dispatch, autograd, autocast. Fused attention computes nothing.

#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <torch/library.h>

using at::Tensor, torch::CppFunction;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
template <class T> using Opt = std::optional<T>;

extern "C" { long launches = 0; }  // of kernels; views and allocations launch nothing

const c10::DispatchKeySet kCuda(c10::DispatchKey::CUDA), kCpu(c10::DispatchKey::CPU);

// The same memory on device "cuda" or the host. Only on the host it can be resized.
Tensor moved(const Tensor& tensor, bool to_host) {
  auto kept = new c10::Storage(tensor.storage());  // lives as long as the new storage
  c10::DataPtr data(kept->mutable_data(), kept, [](void* storage) { delete static_cast<c10::Storage*>(storage); },
                    to_host ? c10::Device(at::kCPU) : c10::Device(at::kCUDA, 0));
  c10::Storage storage(c10::Storage::use_byte_size_t(), kept->nbytes(), std::move(data),
                       to_host ? c10::GetAllocator(at::kCPU) : nullptr, to_host);
  Tensor other = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), to_host ? kCpu : kCuda, tensor.dtype());
  other.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return other;
}

// Calls the CPU's kernel; on device "cuda" this is the kernel of nearly all operators.
template <bool is_launch> void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  launches += is_launch;
  std::vector<std::pair<Tensor, Tensor>> inputs;  // and the same on the host
  auto to_host = [&](const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    return inputs.emplace_back(tensor, moved(tensor, true)).second;
  };
  auto to_device = [&](const Tensor& tensor) {
    for (auto& [input, host] : inputs)
      if (host.is_same(tensor)) return input;  // of an operator in place
    return tensor.defined() ? moved(tensor, false) : tensor;
  };
  auto change_last = [&](size_t count, auto& change) {
    for (auto value = stack->end() - count; value != stack->end(); ++value) {
      if (value->isTensor()) *value = change(value->toTensor());
      if (value->isDevice()) *value = c10::Device(at::kCPU);  // of the memory to allocate
      if (!value->isTensorList() && !value->isOptionalTensorList()) continue;
      c10::List<c10::IValue> list = value->toList().copy();
      for (size_t i = 0; i < list.size(); ++i)
        if (list.get(i).isTensor()) list.set(i, change(list.get(i).toTensor()));
      *value = list;
    }
  };
  change_last(op.schema().arguments().size(), to_host);
  op.redispatchBoxed(kCpu, stack);
  for (auto& [input, host] : inputs)
    if (input.sizes() != host.sizes())  // an output was resized
      input.unsafeGetTensorImpl()->shallow_copy_from(moved(host, false).getIntrusivePtr());
  change_last(op.schema().returns().size(), to_device);
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const Opt<Tensor>& bias, double dropout,
                 bool causal, Opt<double> scale, bool) {
  return std::get<0>(
      at::_scaled_dot_product_efficient_attention(query, key, value, bias, true, dropout, causal, scale));
}

Four forward(const Tensor& query, const Tensor&, const Tensor&, const Opt<Tensor>&, bool, double, bool, Opt<double>) {
  ++launches;
  Tensor context = at::empty_like(query.transpose(1, 2), at::MemoryFormat::Contiguous).transpose(1, 2);
  Tensor log_sum = at::empty(query.sizes().slice(0, 3), query.options().dtype(at::kFloat));
  return {context, log_sum, log_sum, log_sum};
}

Four backward(const Tensor&, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
              const Tensor&, const Tensor&, const Tensor&, const Tensor&, double, std::array<bool, 4> needed, bool,
              Opt<double>) {
  ++launches;
  auto like = [](const Tensor& tensor, bool needed = true) { return needed ? at::empty_like(tensor) : Tensor(); };
  return {like(query), like(key), like(value), like(bias, needed[3])};
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(CppFunction::makeFromBoxedFunction<&run_on_host<true>>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  for (auto name : {"empty.memory_format", "empty_strided"})
    library.impl(name, CppFunction::makeFromBoxedFunction<&run_on_host<false>>());
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  for (auto name : {"copy_", "native_layer_norm"})  // for which there are general kernels, too
    library.impl(name, CppFunction::makeFromBoxedFunction<&run_on_host<true>>());
  library.impl("scaled_dot_product_attention", attention);
  library.impl("_scaled_dot_product_efficient_attention", forward);
  library.impl("_scaled_dot_product_efficient_attention_backward", backward);
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) { library.impl("scaled_dot_product_attention", attention); }
