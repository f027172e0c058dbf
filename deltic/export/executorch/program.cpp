// Programs for Python, called through ctypes, which releases the interpreter's lock while they compute; ExecuTorch's own
// binding holds it. Statuses are 0 or ExecuTorch's errors.

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

namespace {

using executorch::aten::ScalarType;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::runtime::Error;

constexpr char kMethod[] = "forward";

// Programs run one at a time, as under Python's lock, because they share ExecuTorch's threads.
std::mutex turn;

}  // namespace

extern "C" {

int deltic_program_open(const char* path, Module** program) {
    std::lock_guard<std::mutex> held(turn);
    auto made = std::make_unique<Module>(path, Module::LoadMode::Mmap);
    Error error = made->load_method(kMethod);
    if (error == Error::Ok) *program = made.release();
    return int(error);
}

void deltic_program_close(Module* program) { delete program; }

// Returns a buffer's content, its number of dimensions, and their sizes (at most 8).
int deltic_program_buffer(Module* program, const char* name, float** content, int64_t* sizes, int64_t* dimensions) {
    auto method = program->method(kMethod);
    if (!method.ok()) return int(method.error());
    auto found = (*method)->get_attribute(name);
    if (!found.ok()) return int(found.error());
    if (found->scalar_type() != ScalarType::Float || found->dim() > 8) return int(Error::InvalidArgument);
    *content = found->mutable_data_ptr<float>();
    *dimensions = found->dim();
    for (int64_t i = 0; i < found->dim(); ++i) sizes[i] = found->size(i);
    return 0;
}

// Appends tokens. Writes the logits [vocabulary] of the last one.
int deltic_program_run(Module* program, int64_t* tokens, int64_t count, int64_t position, float* logits,
                       int64_t vocabulary) {
    std::lock_guard<std::mutex> held(turn);
    auto ids = from_blob(tokens, {1, int32_t(count)}, ScalarType::Long);
    auto place = from_blob(&position, {1}, ScalarType::Long);
    auto found = program->execute(kMethod, {ids, place});
    if (!found.ok()) return int(found.error());
    const auto& rows = found->at(0).toTensor();
    if (rows.scalar_type() != ScalarType::Float || rows.numel() < vocabulary) return int(Error::InvalidArgument);
    std::memcpy(logits, rows.const_data_ptr<float>() + rows.numel() - vocabulary, size_t(vocabulary) * sizeof(float));
    return 0;
}
}
