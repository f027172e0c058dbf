// deltic's operators for ExecuTorch's runtime: one operator computes everything between the projections of a layer, with
// the kernels of deltic.h. Programs of `deltic export --operators deltic` need this library.
//
// All tensors are contiguous float32, except `position` [1] int64, the number of tokens before the call. There is one
// sequence. Schemas: deltic/export/executorch/network.py.

#include <cstring>
#include <numeric>
#include <vector>

#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/kernel/kernel_runtime_context.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include "deltic.h"

namespace {

using namespace executorch::runtime;
using executorch::aten::Tensor;

// The kernels' scratch memory for the calling thread, which computes alone: the threads of ExecuTorch's pool spin while
// they wait for the next product, and would slow more threads down.
class Pool {
public:
    ~Pool() { deltic_pool_free(pool_); }
    deltic_pool* get() { return pool_; }

private:
    deltic_pool* pool_ = deltic_pool_new(1, deltic_best_level());
};

deltic_pool* pool() {
    thread_local Pool own;
    return own.get();
}

const float* numbers(const EValue* value) { return value->toTensor().const_data_ptr<float>(); }
const float* numbers_or_null(const EValue* value) { return value->isNone() ? nullptr : numbers(value); }

// A batch with one row, as the kernels take it.
struct Step {
    int64_t starts[2], done, slot = 0;
    deltic_batch batch{};

    Step(int64_t tokens, int64_t position) : starts{0, tokens}, done(position) {
        batch.rows = 1;
        batch.tokens = tokens;
        batch.starts = starts;
        batch.done = &done;
        batch.source = batch.target = &slot;
    }
};

// Resizes the output, runs the call, and reports its status to the runtime.
template <typename Call>
void run(KernelRuntimeContext& context, Tensor& output, int64_t tokens, int64_t width, Call call) {
    executorch::aten::SizesType sizes[] = {int32_t(tokens), int32_t(width)};
    if (resize_tensor(output, {sizes, 2}) != Error::Ok)
        return context.fail(Error::InvalidArgument);
    int status = pool() ? call(pool()) : -1;
    if (status) context.fail(status == -1 ? Error::MemoryAllocationFailed : Error::InvalidArgument);
}

// gated_delta_net(projected [T, C + values + 2 Hv], position, conv [C, K], decay [Hv], dt_bias [Hv], norm [Dv],
// conv_state [K - 1, C], recurrent_state [1, Hv, Dk, Dv], key_heads, eps) -> [T, values]
void gated_delta_net(KernelRuntimeContext& context, Span<EValue*> stack) {
    const Tensor &projected = stack[0]->toTensor(), &conv = stack[2]->toTensor();
    const Tensor &inputs = stack[6]->toTensor(), &state = stack[7]->toTensor();
    const int64_t tokens = projected.size(0), heads = state.size(1), columns = state.size(3), values = heads * columns;

    deltic_gdn_layer layer{};
    layer.conv = conv.const_data_ptr<float>();
    layer.decay = numbers(stack[3]);
    layer.dt_bias = numbers(stack[4]);
    layer.norm = numbers(stack[5]);
    layer.key_heads = stack[8]->toInt();
    layer.value_heads = heads;
    layer.key_dim = state.size(2);
    layer.value_dim = columns;
    layer.kernel = conv.size(1);
    layer.eps = float(stack[9]->toDouble());
    const int64_t channels = 2 * layer.key_heads * layer.key_dim + values;
    if (conv.size(0) != channels || inputs.size(1) != channels || inputs.size(0) + 1 < layer.kernel ||
        projected.size(1) != channels + values + 2 * heads)
        return context.fail(Error::InvalidArgument);

    deltic_states states{};
    states.recurrent = state.mutable_data_ptr<float>();
    states.conv = inputs.mutable_data_ptr<float>();
    states.places = inputs.size(0);
    states.type = DELTIC_F32;
    states.slots = 1;
    const Step step(tokens, *stack[1]->toTensor().const_data_ptr<int64_t>());
    Tensor& output = stack[10]->toTensor();
    run(context, output, tokens, values, [&](deltic_pool* own) {
        return deltic_gdn(own, &layer, &states, &step.batch, projected.const_data_ptr<float>(),
                          output.mutable_data_ptr<float>());
    });
}

// attention(joined [T, rows of qkv], position, cosines, sines [places, rotary_dim], q_norm, k_norm [D] or None, keys,
// values [1, places in whole pages, kv_heads, D], heads, gate, eps) -> [T, heads * D]
void attention(KernelRuntimeContext& context, Span<EValue*> stack) {
    const Tensor &joined = stack[0]->toTensor(), &cosines = stack[2]->toTensor();
    const Tensor &keys = stack[6]->toTensor(), &values = stack[7]->toTensor();
    const int64_t tokens = joined.size(0), position = *stack[1]->toTensor().const_data_ptr<int64_t>();

    deltic_attention_layer layer{};
    layer.q_norm = numbers_or_null(stack[4]);
    layer.k_norm = numbers_or_null(stack[5]);
    layer.heads = stack[8]->toInt();
    layer.kv_heads = keys.size(2);
    layer.head_dim = keys.size(3);
    layer.rotary_dim = cosines.size(1);
    layer.gate = stack[9]->toBool();
    layer.eps = float(stack[10]->toDouble());
    const int64_t width = layer.heads * layer.head_dim, pages = keys.size(1) / DELTIC_PAGE;
    if (position < 0 || position + tokens > cosines.size(0) || position + tokens > pages * DELTIC_PAGE ||
        joined.size(1) != (layer.gate ? 2 : 1) * width + 2 * layer.kv_heads * layer.head_dim)
        return context.fail(Error::InvalidArgument);

    const deltic_kv kv{keys.mutable_data_ptr<float>(), values.mutable_data_ptr<float>(), DELTIC_F32, pages};
    std::vector<int64_t> table(pages), store(tokens);
    std::iota(table.begin(), table.end(), 0);
    std::iota(store.begin(), store.end(), position);
    Step step(tokens, position);
    step.batch.table = pages;
    step.batch.pages = table.data();
    step.batch.store = store.data();
    Tensor& output = stack[11]->toTensor();
    run(context, output, tokens, width, [&](deltic_pool* own) {
        return deltic_attention(own, &layer, &kv, &step.batch, numbers(stack[2]) + position * layer.rotary_dim,
                                numbers(stack[3]) + position * layer.rotary_dim, joined.const_data_ptr<float>(),
                                output.mutable_data_ptr<float>());
    });
}

const Kernel KERNELS[] = {Kernel("deltic::gated_delta_net.out", gated_delta_net),
                          Kernel("deltic::attention.out", attention)};
// Registering them twice, from another copy of this library, would abort the process.
Error register_once() {
    for (const Kernel& known : get_registered_kernels())
        if (!std::strcmp(known.name_, KERNELS[0].name_)) return Error::Ok;
    return register_kernels({KERNELS, 2});
}
[[maybe_unused]] const Error REGISTERED = register_once();

}  // namespace
