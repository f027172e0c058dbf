// Answers a question with an exported model, without Python:
//
//     runner model.pte "What is the capital of France?" [TOKENS]
//
// The answer goes to stdout, what the program says of itself to stderr. tokenizer.json lies in model.files.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

#include "tokenizer.h"

using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::runtime::Error;

namespace {

[[noreturn]] void give_up(const std::string& message) {
    std::fprintf(stderr, "runner: error: %s\n", message.c_str());
    std::exit(2);
}

// What a method that takes nothing says.
executorch::runtime::EValue fact(Module& module, const char* name) {
    auto found = module.execute(name);
    if (!found.ok()) give_up(std::string("the program does not say ") + name);
    return found->at(0);
}

class Model {
public:
    explicit Model(const std::string& path) : module_(path) {
        if (module_.load() != Error::Ok) give_up(path + " is no program that can be loaded");
        if (Error error = module_.load_method("forward"); error != Error::Ok)
            give_up(path + " needs an operator or a backend that is not linked (" + std::to_string(int(error)) + ")");
        max_context = fact(module_, "get_max_context_len").toInt();
        vocabulary = fact(module_, "get_vocab_size").toInt();
        chunk_ = fact(module_, "enable_dynamic_shape").toBool() ? fact(module_, "get_max_seq_len").toInt() : 1;
        auto said = module_.execute("get_eos_ids");
        if (said.ok())
            for (const auto& id : *said) ends.insert(id.toInt());
    }

    // Reads tokens at the places from `position_` on; the best token after them.
    int64_t read(std::vector<int64_t> tokens) {
        if (position_ + int64_t(tokens.size()) > max_context)
            give_up("the program was exported for " + std::to_string(max_context) + " tokens, which this passes");
        int64_t best = 0;
        for (size_t at = 0; at < tokens.size(); at += chunk_) {
            const int count = int(std::min<int64_t>(chunk_, tokens.size() - at));
            auto ids = from_blob(tokens.data() + at, {1, count}, executorch::aten::ScalarType::Long);
            auto place = from_blob(&position_, {1}, executorch::aten::ScalarType::Long);
            auto found = module_.execute("forward", {ids, place});
            if (!found.ok()) give_up("the program failed (" + std::to_string(int(found.error())) + ")");
            const float* logits = found->at(0).toTensor().const_data_ptr<float>();
            best = std::max_element(logits, logits + vocabulary) - logits;
            position_ += count;
        }
        return best;
    }

    int64_t max_context, vocabulary;
    std::set<int64_t> ends;

private:
    Module module_;
    int64_t chunk_, position_ = 0;
};

}  // namespace

int main(int count, char** given) {
    if (count < 3) give_up("write runner model.pte QUESTION [TOKENS]");
    const std::string path = given[1], base = path.substr(0, path.rfind('.'));
    const int most = count > 3 ? std::atoi(given[3]) : 64;
    try {
        const Tokenizer tokenizer(base + ".files/tokenizer.json");
        Model model(path);
        std::fprintf(stderr, "%lld tokens in the vocabulary, a context of %lld\n", (long long)model.vocabulary,
                     (long long)model.max_context);
        // the template of Qwen3.5, with thinking switched off
        const std::string prompt = std::string("<|im_start|>user\n") + given[2] +
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
        int64_t token = model.read(tokenizer.encode(prompt));
        for (int made = 0; made < most && !model.ends.count(token); ++made) {
            std::fputs(tokenizer.decode(token).c_str(), stdout);
            std::fflush(stdout);
            token = model.read({token});
        }
        std::puts("");
    } catch (const std::exception& error) {
        give_up(error.what());
    }
}
