// A byte-level BPE tokenizer as in tokenizer.json, for text in ASCII: vocabulary, merges and added tokens.
#pragma once

#include <algorithm>
#include <cctype>
#include <climits>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

class Tokenizer {
public:
    explicit Tokenizer(const std::string& path) {
        std::ifstream file(path, std::ios::binary);
        text_.assign(std::istreambuf_iterator<char>(file), {});
        if (text_.empty()) throw std::runtime_error("there is no " + path);
        read_vocabulary();
        read_merges();
        read_added();
        text_.clear();
        for (int byte = 0, next = 256; byte < 256; ++byte) {  // printable bytes stand for themselves
            const bool shown = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
            letter_[byte] = utf8(shown ? byte : next++);
            byte_[letter_[byte]] = char(byte);
        }
    }

    // Token ids of a text; added tokens, such as <|im_start|>, are found in it.
    std::vector<int64_t> encode(const std::string& text) const {
        std::vector<int64_t> ids;
        for (size_t at = 0, next; at < text.size(); at = next) {
            size_t found = std::string::npos;
            const std::pair<const std::string, int64_t>* added = nullptr;
            for (const auto& token : added_)
                if (size_t place = text.find(token.first, at); place < found) found = place, added = &token;
            next = std::min(found, text.size());
            for (const std::string& word : words(text.substr(at, next - at)))
                for (const std::string& part : merged(word)) ids.push_back(vocabulary_.at(part));
            if (added) ids.push_back(added->second), next += added->first.size();
        }
        return ids;
    }

    // The bytes of a token; none of an added one.
    std::string decode(int64_t id) const {
        auto found = spelled_.find(id);
        if (found == spelled_.end()) return "";
        std::string bytes;
        for (const std::string& letter : letters(found->second)) bytes += byte_.at(letter);
        return bytes;
    }

private:
    static std::string utf8(unsigned code) {
        if (code < 0x80) return {char(code)};
        if (code < 0x800) return {char(0xC0 | code >> 6), char(0x80 | (code & 63))};
        return {char(0xE0 | code >> 12), char(0x80 | (code >> 6 & 63)), char(0x80 | (code & 63))};
    }

    static std::vector<std::string> letters(const std::string& text) {
        std::vector<std::string> found;
        for (char byte : text)
            if ((byte & 0xC0) == 0x80) found.back() += byte; else found.emplace_back(1, byte);
        return found;
    }

    void seek(const char* wanted) {
        at_ = text_.find(wanted, at_);
        if (at_ == std::string::npos) throw std::runtime_error(std::string("tokenizer.json has no ") + wanted);
        at_ += std::string(wanted).size();
    }

    char skip() {  // to what is no space, comma or colon
        while (std::isspace((unsigned char)text_.at(at_)) || text_[at_] == ',' || text_[at_] == ':') ++at_;
        return text_[at_];
    }

    std::string string() {
        std::string found;
        for (++at_; text_.at(at_) != '"'; ++at_) {
            if (text_[at_] != '\\') { found += text_[at_]; continue; }
            const char kind = text_.at(++at_);
            if (kind == 'u') found += utf8(std::stoul(text_.substr(at_ + 1, 4), nullptr, 16)), at_ += 4;
            else found += kind == 'n' ? '\n' : kind == 't' ? '\t' : kind == 'r' ? '\r' : kind;
        }
        ++at_;
        return found;
    }

    int64_t number() {
        size_t size;
        const int64_t found = std::stoll(text_.substr(at_, 20), &size);
        at_ += size;
        return found;
    }

    void read_vocabulary() {
        seek("\"vocab\"");
        for (at_ = text_.find('{', at_) + 1; skip() != '}';) {
            const std::string token = string();
            skip();
            spelled_[vocabulary_[token] = number()] = token;
        }
    }

    void read_merges() {  // "a b", or ["a", "b"]
        seek("\"merges\"");
        for (at_ = text_.find('[', at_) + 1; skip() != ']';) {
            const bool pair = text_[at_] == '[';
            if (pair) ++at_, skip();
            std::string first = string(), second;
            if (pair) skip(), second = string(), skip(), ++at_;
            else second = first.substr(first.find(' ') + 1), first.resize(first.find(' '));
            const int rank = int(ranks_.size());
            ranks_[{first, second}] = rank;
        }
    }

    void read_added() {
        at_ = 0;
        seek("\"added_tokens\"");
        const size_t end = text_.find(']', at_);
        while ((at_ = text_.find("\"id\"", at_)) < end) {
            at_ += 4, skip();
            const int64_t id = number();
            seek("\"content\"");
            skip();
            added_[string()] = id;
        }
    }

    // Runs of letters with one other character before, single digits, runs of signs with a space before, white space.
    static std::vector<std::string> words(const std::string& text) {
        std::vector<std::string> found;
        auto kind = [&](size_t i) {
            const unsigned char byte = i < text.size() ? text[i] : ' ';
            return std::isalpha(byte) || byte > 127 ? 'a' : std::isdigit(byte) ? '0' : std::isspace(byte) ? ' ' : '!';
        };
        for (size_t at = 0, end; at < text.size(); at = end) {
            end = at;
            const bool line = text[at] == '\n' || text[at] == '\r';
            if (kind(at) == 'a' || (kind(at) != '0' && !line && kind(at + 1) == 'a' && at + 1 < text.size())) {
                for (++end; kind(end) == 'a' && end < text.size();) ++end;
            } else if (kind(at) == '0') {
                ++end;
            } else if (kind(at) == '!' || (text[at] == ' ' && kind(at + 1) == '!')) {
                for (++end; kind(end) == '!' && end < text.size();) ++end;
                while (end < text.size() && (text[end] == '\n' || text[end] == '\r')) ++end;
            } else {
                while (end < text.size() && kind(end) == ' ') ++end;
                const size_t last = text.substr(at, end - at).find_last_of("\r\n");
                if (last != std::string::npos) end = at + last + 1;
                else if (end < text.size() && end - at > 1) --end;  // the last one goes with what follows
            }
            found.push_back(text.substr(at, end - at));
        }
        return found;
    }

    std::vector<std::string> merged(const std::string& word) const {
        std::vector<std::string> parts;
        for (unsigned char byte : word) parts.push_back(letter_[byte]);
        while (true) {
            int best = INT_MAX;
            size_t place = 0;
            for (size_t i = 0; i + 1 < parts.size(); ++i)
                if (auto rank = ranks_.find({parts[i], parts[i + 1]}); rank != ranks_.end() && rank->second < best)
                    best = rank->second, place = i;
            if (best == INT_MAX) return parts;
            parts[place] += parts[place + 1];
            parts.erase(parts.begin() + place + 1);
        }
    }

    std::string text_, letter_[256];
    size_t at_ = 0;
    std::map<std::string, char> byte_;
    std::map<std::string, int64_t> vocabulary_, added_;
    std::map<int64_t, std::string> spelled_;
    std::map<std::pair<std::string, std::string>, int> ranks_;
};
