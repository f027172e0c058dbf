// The three operators of ExecuTorch's `llama` library that exported programs call, in plain C++: keeping K/V, attention
// over it, and the gated delta rule. ExecuTorch's packages for phones have them; its wheel has them for Python alone.
// All tensors are float32 and contiguous, and there is one sequence.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include <executorch/runtime/kernel/kernel_runtime_context.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>

using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::Kernel;
using executorch::runtime::KernelRuntimeContext;
using executorch::runtime::Span;

namespace {

bool resized(KernelRuntimeContext& context, Tensor& tensor, std::vector<executorch::aten::SizesType> sizes) {
    if (executorch::runtime::resize_tensor(tensor, {sizes.data(), sizes.size()}) == Error::Ok) return true;
    context.fail(Error::InvalidArgument);
    return false;
}

// update_cache(value [1, T, heads, D], cache [1, places, heads, D], start) -> nothing of use
void update_cache(KernelRuntimeContext& context, Span<EValue*> stack) {
    const Tensor &value = stack[0]->toTensor(), &cache = stack[1]->toTensor();
    const int64_t start = stack[2]->toInt(), place = value.size(2) * value.size(3);
    if (start < 0 || start + value.size(1) > cache.size(1)) return context.fail(Error::InvalidArgument);
    std::memcpy(cache.mutable_data_ptr<float>() + start * place, value.const_data_ptr<float>(),
                sizeof(float) * value.size(1) * place);
}

// custom_sdpa(query [1, T, heads, D], keys, values [1, places, kv heads, D], start, ...) -> [1, T, heads, D]: token t
// attends to the places 0 to start + t
void attention(KernelRuntimeContext& context, Span<EValue*> stack) {
    const Tensor &query = stack[0]->toTensor(), &keys = stack[1]->toTensor(), &values = stack[2]->toTensor();
    Tensor& output = stack[stack.size() - 1]->toTensor();
    const int64_t start = stack[3]->toInt(), tokens = query.size(1), heads = query.size(2), size = query.size(3);
    const int64_t kv_heads = keys.size(2), place = kv_heads * size, shared = heads / kv_heads;
    if (start < 0 || start + tokens > keys.size(1)) return context.fail(Error::InvalidArgument);
    if (!resized(context, output, {1, int32_t(tokens), int32_t(heads), int32_t(size)})) return;
    const float scale = 1 / std::sqrt(float(size));
    std::vector<float> chances(start + tokens);
    for (int64_t token = 0; token < tokens; ++token) {
        for (int64_t head = 0; head < heads; ++head) {
            const float* own = query.const_data_ptr<float>() + (token * heads + head) * size;
            const float* key = keys.const_data_ptr<float>() + head / shared * size;
            const float* value = values.const_data_ptr<float>() + head / shared * size;
            float* result = output.mutable_data_ptr<float>() + (token * heads + head) * size;
            const int64_t count = start + token + 1;
            float most = -INFINITY, total = 0;
            for (int64_t i = 0; i < count; ++i) {
                chances[i] = 0;
                for (int64_t d = 0; d < size; ++d) chances[i] += own[d] * key[i * place + d];
                most = std::max(most, chances[i] *= scale);
            }
            std::fill(result, result + size, 0.f);
            for (int64_t i = 0; i < count; ++i) total += chances[i] = std::exp(chances[i] - most);
            for (int64_t i = 0; i < count; ++i)
                for (int64_t d = 0; d < size; ++d) result[d] += chances[i] / total * value[i * place + d];
        }
    }
}

// gated_delta_rule(query, key [1, heads, T, Dk], value [1, heads, T, Dv], decay, beta [1, heads, T],
// state [1, heads, Dk, Dv]) -> (output [1, heads, T, Dv], state after), one token after another
void gated_delta_rule(KernelRuntimeContext& context, Span<EValue*> stack) {
    const Tensor &query = stack[0]->toTensor(), &key = stack[1]->toTensor(), &value = stack[2]->toTensor();
    const Tensor &decay = stack[3]->toTensor(), &beta = stack[4]->toTensor(), &before = stack[5]->toTensor();
    Tensor &output = stack[6]->toTensor(), &after = stack[7]->toTensor();
    const int64_t heads = key.size(1), tokens = key.size(2), rows = key.size(3), columns = value.size(3);
    if (!resized(context, output, {1, int32_t(heads), int32_t(tokens), int32_t(columns)})) return;
    std::memcpy(after.mutable_data_ptr<float>(), before.const_data_ptr<float>(), before.nbytes());
    std::vector<float> update(columns);
    for (int64_t head = 0; head < heads; ++head) {
        float* state = after.mutable_data_ptr<float>() + head * rows * columns;
        for (int64_t token = 0; token < tokens; ++token) {
            const int64_t at = head * tokens + token;
            const float *k = key.const_data_ptr<float>() + at * rows, *q = query.const_data_ptr<float>() + at * rows;
            const float *v = value.const_data_ptr<float>() + at * columns;
            const float a = decay.const_data_ptr<float>()[at], b = beta.const_data_ptr<float>()[at];
            float* result = output.mutable_data_ptr<float>() + at * columns;
            std::fill(update.begin(), update.end(), 0.f);
            std::fill(result, result + columns, 0.f);
            for (int64_t i = 0; i < rows; ++i)
                for (int64_t j = 0; j < columns; ++j) update[j] += (state[i * columns + j] *= a) * k[i];
            for (int64_t j = 0; j < columns; ++j) update[j] = b * (v[j] - update[j]);
            for (int64_t i = 0; i < rows; ++i)
                for (int64_t j = 0; j < columns; ++j) result[j] += (state[i * columns + j] += k[i] * update[j]) * q[i];
        }
    }
}

const Kernel KERNELS[] = {Kernel("llama::update_cache.out", update_cache),
                          Kernel("llama::custom_sdpa.out", attention),
                          Kernel("llama::gated_delta_rule.out", gated_delta_rule)};
[[maybe_unused]] const Error REGISTERED = executorch::runtime::register_kernels({KERNELS, 3});

}  // namespace
