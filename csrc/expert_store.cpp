// Expert cache: some experts are in memory, and threads read the others from files while the step computes.
//
// Each layer has slots for its experts in memory. An expert that is read for a step either takes the slot of an expert
// with fewer recent hits, so that a replacement needs no extra read, or stays in one of a few stages (buffers) until it
// was used. Bytes are read from the model's own files, past the page cache if a file was opened with O_DIRECT. The
// thread that has read them packs them.
#include "expert_store.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
#include <mutex>
#include <new>
#include <thread>

#include "matrix.hpp"

namespace deltic {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kSector = 4096;          // O_DIRECT needs offsets and sizes that are multiples of this
constexpr int64_t kRead = 1 << 20;         // bytes of a read, approximate maximum
constexpr int64_t kStageBytes = 64 << 20;  // bytes of all stages, approximate maximum
constexpr int64_t kStages = 16, kFewestStages = 2;
constexpr float kHalfLife = 512;           // tokens after which a hit counts half
constexpr int64_t kPrompt = 16;            // steps of more tokens contain prompts

int64_t since(Clock::time_point begun) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begun).count();
}

int64_t up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// Modification time of a file in nanoseconds.
int64_t changed(const struct stat &file) {
#if defined(__APPLE__)
    const timespec &time = file.st_mtimespec;
#else
    const timespec &time = file.st_mtim;
#endif
    return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
}

// Anonymous pages, which take memory at their first write.
struct Memory {
    uint8_t *at = nullptr;
    int64_t size = 0;

    void take(int64_t wanted) {
        constexpr int64_t kLargePage = 2 << 20;
        size = up(wanted, kLargePage);
        void *found = mmap(nullptr, size_t(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (found == MAP_FAILED) throw std::bad_alloc();
        at = static_cast<uint8_t *>(found);
#if defined(MADV_HUGEPAGE)
        madvise(at, size_t(size), MADV_HUGEPAGE);
#endif
    }
    ~Memory() {
        if (at) munmap(at, size_t(size));
    }
};

// One of the three matrices of a layer's experts. start: offset in an expert's memory.
struct Shape {
    int64_t type, rows, columns, row_bytes, start;
};

struct Layer {
    Shape matrices[3];
    std::vector<deltic_extent> extents;
    int64_t bytes = 0, slots = 0, steps = 0;
    Memory memory;
    std::vector<int64_t> holder, slot;  // expert of each slot, slot of each expert; -1: none
    std::vector<float> score;           // recent hits of each expert
    std::atomic<int64_t> hits{0}, misses{0};
};

struct File {
    int descriptor;
    bool direct;
    struct stat found;
};

struct Read {
    Fetch *fetch;
    int64_t matrix, first, count;
};

}  // namespace

// An expert that is being read: into a slot, into a stage, or into a stage and later copied to a slot.
struct Fetch {
    int64_t layer, expert, slot = -1, stage = -1;
    uint8_t *to = nullptr;
    int64_t left = 0;  // unfinished reads
    bool begun = false, dropped = false;
    bool staged = false;  // this step still uses the expert in the slot, so this one is read into a stage first
    int64_t failure = 0, file = 0;
};

}  // namespace deltic

using namespace deltic;

// `lock` guards all fields below it, except atomics.
struct deltic_expert_store {
    std::vector<Layer> layers;
    std::vector<File> files;
    int64_t experts, refresh;
    Memory memory;  // stages, then a read buffer for each thread
    int64_t stage_bytes = 0, buffer_bytes = 0;
    std::vector<std::thread> readers;

    std::mutex lock;
    std::condition_variable news, arrived;
    std::deque<Read> wanted, predicted;
    std::vector<int64_t> stages;                  // free stages
    std::list<std::unique_ptr<Fetch>> ahead;      // predicted fetches, and dropped ones with unfinished reads
    bool closing = false;
    int64_t busy = 0;
    Clock::time_point begun;
    int64_t failure = 0, failed = 0;
    std::atomic<int64_t> bytes{0}, promotions{0}, refreshes{0}, waited{0}, reading{0}, guessed{0}, useful{0};

    ~deltic_expert_store() {
        {
            std::lock_guard guard(lock);
            closing = true;
        }
        news.notify_all();
        for (auto &reader : readers) reader.join();
    }

    uint8_t *stage(int64_t number) { return memory.at + number * stage_bytes; }

    void push(std::deque<Read> &queue, Fetch *fetch) {
        const Layer &layer = layers[size_t(fetch->layer)];
        fetch->begun = true;
        for (int64_t matrix = 0; matrix < 3; ++matrix) {
            const Shape &shape = layer.matrices[matrix];
            int64_t together = std::max(kRead / shape.row_bytes / kPanel * kPanel, kPanel);
            for (int64_t first = 0; first < shape.rows; first += together) {
                queue.push_back({fetch, matrix, first, std::min(together, shape.rows - first)});
                ++fetch->left;
            }
        }
    }

    void withdraw(std::deque<Read> &queue, Fetch *fetch) {
        auto gone = std::remove_if(queue.begin(), queue.end(), [&](const Read &read) { return read.fetch == fetch; });
        fetch->left -= queue.end() - gone;
        queue.erase(gone, queue.end());
    }

    // Reads some rows and packs them to their place. Returns an error, or 0.
    int64_t carry_out(const Read &read, uint8_t *buffer) {
        const Layer &layer = layers[size_t(read.fetch->layer)];
        const Shape &shape = layer.matrices[read.matrix];
        const deltic_extent &extent = layer.extents[size_t(3 * read.fetch->expert + read.matrix)];
        const File &file = files[size_t(extent.file)];
        int64_t begin = extent.offset + read.first * shape.row_bytes, size = read.count * shape.row_bytes;
        int64_t start = begin / kSector * kSector, end = up(begin + size, kSector), got = 0;
        while (start + got < begin + size) {
            ssize_t count = pread(file.descriptor, buffer + got, size_t(end - start - got), start + got);
            if (count < 0 && errno == EINTR) continue;
            if (count < 0) return errno;
            if (!count) return DELTIC_FILE_ENDED;
            got += count;
        }
        bytes += size;
#if defined(POSIX_FADV_DONTNEED)
        if (!file.direct) posix_fadvise(file.descriptor, start, end - start, POSIX_FADV_DONTNEED);
#endif
        struct stat now;
        if (fstat(file.descriptor, &now)) return errno;
        if (now.st_size != file.found.st_size || changed(now) != changed(file.found)) return DELTIC_FILE_CHANGED;
        deltic_pack(shape.type, buffer + (begin - start), read.first, read.count, shape.columns,
                    read.fetch->to + shape.start);
        return 0;
    }

    void serve(uint8_t *buffer) {
        std::unique_lock guard(lock);
        while (true) {
            news.wait(guard, [&] { return closing || !wanted.empty() || !predicted.empty(); });
            if (closing) return;
            std::deque<Read> &queue = wanted.empty() ? predicted : wanted;
            Read read = queue.front();
            queue.pop_front();
            if (!busy++) begun = Clock::now();
            guard.unlock();
            int64_t failure = carry_out(read, buffer);
            guard.lock();
            if (!--busy) reading += since(begun);
            Fetch *fetch = read.fetch;
            if (failure) {
                fetch->failure = failure;
                fetch->file = layers[size_t(fetch->layer)].extents[size_t(3 * fetch->expert + read.matrix)].file;
            }
            if (!--fetch->left) {
                if (fetch->dropped) let_go(fetch);
                arrived.notify_all();
            }
        }
    }

    // Removes a dropped fetch that no thread is reading, and frees its stage.
    void let_go(Fetch *fetch) {
        stages.push_back(fetch->stage);
        ahead.remove_if([&](const auto &other) { return other.get() == fetch; });
    }

    std::unique_ptr<Fetch> adopt(int64_t layer, int64_t expert) {
        for (auto place = ahead.begin(); place != ahead.end(); ++place) {
            Fetch &fetch = **place;
            if (fetch.layer != layer || fetch.expert != expert || fetch.dropped || fetch.failure) continue;
            auto found = std::move(*place);
            ahead.erase(place);
            auto mine = std::stable_partition(predicted.begin(), predicted.end(),
                                              [&](const Read &read) { return read.fetch != found.get(); });
            wanted.insert(wanted.end(), mine, predicted.end());
            predicted.erase(mine, predicted.end());
            ++useful;
            return found;
        }
        return nullptr;
    }

    // Drops the predicted fetches that no step has adopted.
    void drop() {
        std::vector<Fetch *> idle;
        for (auto &fetch : ahead) {
            if (fetch->dropped) continue;
            withdraw(predicted, fetch.get());
            fetch->dropped = true;
            if (!fetch->left) idle.push_back(fetch.get());
        }
        for (Fetch *fetch : idle) let_go(fetch);
    }

    void vacate(Layer &layer, int64_t slot) {
        if (layer.holder[size_t(slot)] >= 0) layer.slot[size_t(layer.holder[size_t(slot)])] = -1;
        layer.holder[size_t(slot)] = -1;
    }

    void occupy(Layer &layer, int64_t slot, int64_t expert) {
        vacate(layer, slot);
        layer.holder[size_t(slot)] = expert;
        layer.slot[size_t(expert)] = slot;
    }
};

namespace deltic {

Visit::Visit(deltic_expert_store *store, int64_t number, const int64_t *rows, int64_t tokens, int64_t *order)
    : store_(store), layer_(number) {
    std::lock_guard guard(store->lock);
    Layer &layer = store->layers[size_t(number)];
    float kept = std::exp2(-float(tokens) / kHalfLife);
    std::vector<int64_t> missing, slots;
    for (int64_t expert = 0; expert < store->experts; ++expert) {
        float &score = layer.score[size_t(expert)];
        score = score * kept + float(rows[expert]);
        if (!rows[expert]) continue;
        if (layer.slot[size_t(expert)] < 0) missing.push_back(expert);
        else order[resident_++] = expert;
    }
    layer.hits += resident_;
    layer.misses += int64_t(missing.size());
    bool due = tokens > kPrompt || ++layer.steps % store->refresh == 0;
    store->refreshes += due;
    weights_.resize(size_t(resident_) + missing.size());
    for (int64_t place = 0; place < resident_; ++place)
        set(place, layer.memory.at + layer.slot[size_t(order[place])] * layer.bytes);
    if (!missing.empty()) {
        auto score = [&](int64_t expert) { return expert < 0 ? -1.0f : layer.score[size_t(expert)]; };
        std::stable_sort(missing.begin(), missing.end(), [&](int64_t a, int64_t b) { return score(a) > score(b); });
        for (int64_t slot = 0; slot < layer.slots; ++slot) {
            int64_t holder = layer.holder[size_t(slot)];
            if (holder < 0 || due) slots.push_back(slot);
        }
        std::stable_sort(slots.begin(), slots.end(), [&](int64_t a, int64_t b) {
            return score(layer.holder[size_t(a)]) < score(layer.holder[size_t(b)]);
        });
        for (size_t i = 0; i < missing.size(); ++i) {
            int64_t expert = order[resident_ + int64_t(i)] = missing[i];
            auto fetch = store->adopt(number, expert);
            if (!fetch) fetch = std::make_unique<Fetch>(Fetch{number, expert});
            if (i < slots.size() && score(expert) > score(layer.holder[size_t(slots[i])])) {
                int64_t holder = layer.holder[size_t(slots[i])];
                store->promotions += holder >= 0;
                fetch->staged = holder >= 0 && rows[holder];
                store->occupy(layer, fetch->slot = slots[i], expert);
            }
            fetches_.push_back(std::move(fetch));
        }
    }
    store->drop();
    pump();
}

Visit::~Visit() {
    if (done_ == count()) return;
    std::unique_lock guard(store_->lock);
    Layer &layer = store_->layers[size_t(layer_)];
    for (auto &fetch : fetches_) store_->withdraw(store_->wanted, fetch.get());
    store_->arrived.wait(guard, [&] {
        return std::all_of(fetches_.begin(), fetches_.end(), [](const auto &fetch) { return !fetch->left; });
    });
    for (int64_t place = std::max(done_, resident_); place < count(); ++place) {
        Fetch &fetch = *fetches_[size_t(place - resident_)];
        // the contents of these slots are not trusted
        if (fetch.slot >= 0) store_->vacate(layer, fetch.slot);
        if (fetch.stage >= 0) store_->stages.push_back(fetch.stage);
    }
}

int64_t Visit::inner() const { return store_->layers[size_t(layer_)].matrices[0].rows; }

void Visit::set(int64_t place, const uint8_t *at) {
    const Shape *shapes = store_->layers[size_t(layer_)].matrices;
    auto matrix = [&](int i) {
        return deltic_matrix{shapes[i].type, shapes[i].rows, shapes[i].columns, at + shapes[i].start};
    };
    weights_[size_t(place)] = {{2, {matrix(0), matrix(1)}}, {1, {matrix(2)}}};
}

// Starts as many fetches as have room, in their order.
void Visit::pump() {
    Layer &layer = store_->layers[size_t(layer_)];
    bool more = false;
    for (; issued_ < int64_t(fetches_.size()); ++issued_) {
        Fetch &fetch = *fetches_[size_t(issued_)];
        if (!fetch.begun) {
            if (fetch.slot < 0 || fetch.staged) {
                if (store_->stages.empty()) break;
                fetch.stage = store_->stages.back();
                store_->stages.pop_back();
            }
            fetch.to = fetch.stage >= 0 ? store_->stage(fetch.stage) : layer.memory.at + fetch.slot * layer.bytes;
            store_->push(store_->wanted, &fetch);
        }
        set(resident_ + issued_, fetch.to);
        more = true;
    }
    if (more) store_->news.notify_all();
}

bool Visit::there(int64_t place) const {
    if (place < resident_) return true;
    const Fetch &fetch = *fetches_[size_t(place - resident_)];
    return place - resident_ < issued_ && fetch.begun && !fetch.left;
}

int64_t Visit::wait() {
    auto begun = Clock::now();
    std::unique_lock guard(store_->lock);
    const Fetch *broken = nullptr;
    store_->arrived.wait(guard, [&] {
        pump();  // a stage may have become free
        for (auto &fetch : fetches_)
            if (fetch->failure) broken = fetch.get();
        return broken || there(done_);
    });
    store_->waited += since(begun);
    if (broken) {
        store_->failure = broken->failure;
        store_->failed = broken->file;
        throw Unread();
    }
    int64_t end = done_;
    while (end < count() && there(end)) ++end;
    return end;
}

void Visit::done(int64_t end) {
    std::lock_guard guard(store_->lock);
    Layer &layer = store_->layers[size_t(layer_)];
    for (int64_t place = std::max(done_, resident_); place < end; ++place) {
        Fetch &fetch = *fetches_[size_t(place - resident_)];
        if (fetch.stage < 0) continue;
        if (fetch.slot >= 0) std::memcpy(layer.memory.at + fetch.slot * layer.bytes, fetch.to, size_t(layer.bytes));
        store_->stages.push_back(fetch.stage);
    }
    done_ = end;
    pump();
}

void Visit::predict(int64_t layer, const int64_t *experts, int64_t count) {
    std::lock_guard guard(store_->lock);
    if (issued_ < int64_t(fetches_.size())) return;  // this layer's own fetches do not all have room yet
    const std::vector<int64_t> &slot = store_->layers[size_t(layer)].slot;
    for (int64_t i = 0; i < count && !store_->stages.empty(); ++i) {
        bool known = std::any_of(store_->ahead.begin(), store_->ahead.end(), [&](const auto &fetch) {
            return !fetch->dropped && fetch->layer == layer && fetch->expert == experts[i];
        });
        if (known || slot[size_t(experts[i])] >= 0) continue;
        auto fetch = std::make_unique<Fetch>(Fetch{layer, experts[i]});
        fetch->stage = store_->stages.back();
        store_->stages.pop_back();
        fetch->to = store_->stage(fetch->stage);
        store_->push(store_->predicted, fetch.get());
        store_->ahead.push_back(std::move(fetch));
        ++store_->guessed;
    }
    store_->news.notify_all();
}

namespace {

// Sets up shapes, slots and scores of a layer.
void lay_out(Layer &layer, const deltic_stored_layer &from, int64_t experts) {
    for (int i = 0; i < 3; ++i) {
        int64_t rows = i < 2 ? from.rows : from.columns, columns = i < 2 ? from.columns : from.rows;
        BlockShape block = block_shape(from.types[i]);
        int64_t row_bytes = columns * block.bytes / (block.weights * kPanel);
        layer.matrices[i] = {from.types[i], rows, columns, row_bytes, layer.bytes};
        layer.bytes += up(deltic_packed_bytes(from.types[i], rows, columns), 64);
    }
    layer.extents.assign(from.extents, from.extents + 3 * experts);
    layer.slots = std::min(from.slots, experts);
    layer.memory.take(layer.slots * layer.bytes);
    layer.holder.assign(size_t(layer.slots), -1);
    layer.slot.assign(size_t(experts), -1);
    layer.score.assign(size_t(experts), 0);
}

}  // namespace
}  // namespace deltic

extern "C" {

deltic_expert_store *deltic_expert_store_new(const deltic_stored_layer *layers, int64_t count, int64_t experts,
                                             const int *files, int64_t file_count, int readers, int64_t refresh) {
    try {
        auto store = std::make_unique<deltic_expert_store>();
        store->experts = experts;
        store->refresh = refresh;
        for (int64_t i = 0; i < file_count; ++i) {
            File file{files[i], false, {}};
            if (fstat(files[i], &file.found)) return nullptr;
#if defined(O_DIRECT)
            file.direct = fcntl(files[i], F_GETFL) & O_DIRECT;
#endif
            store->files.push_back(file);
        }
        store->layers = std::vector<Layer>(size_t(count));
        int64_t longest = 0;
        for (int64_t i = 0; i < count; ++i) {
            Layer &layer = store->layers[size_t(i)];
            lay_out(layer, layers[i], experts);
            store->stage_bytes = std::max(store->stage_bytes, up(layer.bytes, kSector));
            for (const Shape &shape : layer.matrices) longest = std::max(longest, shape.row_bytes * kPanel);
        }
        int64_t stages = std::clamp(kStageBytes / store->stage_bytes, kFewestStages, kStages);
        store->buffer_bytes = up(std::max(kRead, longest), kSector) + 2 * kSector;
        store->memory.take(stages * store->stage_bytes + readers * store->buffer_bytes);
        for (int64_t stage = stages; stage-- > 0;) store->stages.push_back(stage);
        for (int reader = 0; reader < readers; ++reader) {
            uint8_t *buffer = store->stage(stages) + reader * store->buffer_bytes;
            store->readers.emplace_back([store = store.get(), buffer] { store->serve(buffer); });
        }
        return store.release();
    } catch (...) {
        return nullptr;
    }
}

void deltic_expert_store_free(deltic_expert_store *store) { delete store; }

int deltic_expert_store_fill(deltic_expert_store *store, int64_t number, const int64_t *experts, int64_t count) {
    try {
        std::unique_lock guard(store->lock);
        Layer &layer = store->layers[size_t(number)];
        std::vector<std::unique_ptr<Fetch>> fetches;
        for (int64_t slot = 0; slot < layer.slots && slot < count; ++slot) {
            fetches.push_back(std::make_unique<Fetch>(Fetch{number, experts[slot], slot}));
            fetches.back()->to = layer.memory.at + slot * layer.bytes;
            store->push(store->wanted, fetches.back().get());
        }
        store->news.notify_all();
        store->arrived.wait(guard, [&] {
            return std::all_of(fetches.begin(), fetches.end(), [](const auto &fetch) { return !fetch->left; });
        });
        for (auto &fetch : fetches) {
            if (fetch->failure) {
                store->failure = fetch->failure;
                store->failed = fetch->file;
                return -3;
            }
            store->occupy(layer, fetch->slot, fetch->expert);
        }
        return 0;
    } catch (const std::bad_alloc &) {
        return -1;
    }
}

int64_t deltic_expert_store_failure(const deltic_expert_store *store, int64_t *file) {
    *file = store->failed;
    return store->failure;
}

float *deltic_expert_store_scores(deltic_expert_store *store, int64_t layer) {
    return store->layers[size_t(layer)].score.data();
}

void deltic_expert_store_count(const deltic_expert_store *store, deltic_expert_counts *counts, int64_t *hits,
                               int64_t *misses) {
    *counts = {store->bytes, store->promotions, store->refreshes, store->waited, store->reading, store->guessed,
               store->useful};
    for (size_t i = 0; i < store->layers.size(); ++i) {
        hits[i] = store->layers[i].hits;
        misses[i] = store->layers[i].misses;
    }
}
}
