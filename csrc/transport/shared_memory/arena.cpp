#include "transport/shared_memory/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "transport/memory.h"

namespace pycomm {
namespace {

constexpr double kMiB = 1 << 20;

}  // namespace

Mapping::Mapping(const Descriptor& file, int64_t num_bytes) : num_bytes_(num_bytes) {
    void* data = mmap(nullptr, static_cast<size_t>(num_bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                      file.get(), 0);
    if (data == MAP_FAILED) {
        throw OutOfMemory(
            format("shared memory: mapping %.0f MiB of address space failed (%s); is a limit on address "
                   "space (ulimit -v) in force?",
                   static_cast<double>(num_bytes) / kMiB, std::strerror(errno)));
    }
    data_ = static_cast<char*>(data);
    // Both are hints: huge pages where the system allows them for shared memory, and no gradients in core dumps.
    madvise(data, static_cast<size_t>(num_bytes), MADV_HUGEPAGE);
    madvise(data, static_cast<size_t>(num_bytes), MADV_DONTDUMP);
}

Mapping::~Mapping() { munmap(data_, static_cast<size_t>(num_bytes_)); }

void Mapping::withdraw(const Descriptor& file, int64_t private_bytes) noexcept {
    constexpr int kOver = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    auto all = static_cast<size_t>(num_bytes_), kept = static_cast<size_t>(private_bytes);
    // If that fails, this range becomes inaccessible too: better the child dies than its parent's gradients change.
    if (kept > 0 && mmap(data_, kept, PROT_READ | PROT_WRITE, kOver, file.get(), 0) == MAP_FAILED) kept = 0;
    if (kept < all) mmap(data_ + kept, all - kept, PROT_NONE, kOver | MAP_ANONYMOUS, -1, 0);
    if (kept > 0) madvise(data_, kept, MADV_DONTDUMP);
}

Arena::Arena(Descriptor file, int64_t num_bytes, int64_t begin)
    : file_(std::move(file)), mapping_(std::make_shared<Mapping>(file_, num_bytes)) {
    reserve(begin, begin);
    free_[begin] = num_bytes - begin;
    watch_forks(this);
}

Arena::~Arena() { unwatch_forks(this); }

void Arena::after_fork_in_child() {
    if (file_.is_open())
        mapping_->withdraw(file_, reserved_);  // closed in a child's child, whose pages are already private
    file_.close();
    mutex_.unlock();
}

void Arena::reserve(int64_t end, int64_t wanted) {
    if (end <= reserved_) return;
    int64_t found = available_memory();
    int error = end - reserved_ > found ? ENOMEM : posix_fallocate(file_.get(), reserved_, end - reserved_);
    if (error != 0) {
        throw OutOfMemory(format("shared memory: %.1f MiB needed for a block of %.1f MiB, %.1f MiB found (%s)",
                                 static_cast<double>(end - reserved_) / kMiB, static_cast<double>(wanted) / kMiB,
                                 static_cast<double>(found) / kMiB, std::strerror(error)));
    }
    reserved_ = end;
}

char* Arena::allocate(int64_t num_bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t most = mapping_->num_bytes();  // larger requests are not rounded up: that could overflow
    int64_t size = num_bytes > most ? num_bytes : std::max(page_bytes(), whole_pages(num_bytes));
    auto hole = std::find_if(free_.begin(), free_.end(), [&](const auto& entry) { return entry.second >= size; });
    if (hole == free_.end()) {
        throw OutOfMemory(format("shared memory: %.1f MiB needed, the arena of %.0f MiB has no free block of that size",
                                 static_cast<double>(size) / kMiB, static_cast<double>(mapping_->num_bytes()) / kMiB));
    }
    auto [offset, length] = *hole;
    reserve(offset + size, size);
    free_.erase(hole);
    if (length > size) free_[offset + size] = length - size;
    used_[offset] = size;
    return mapping_->data() + offset;
}

void Arena::release(char* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto entry = used_.find(block - mapping_->data());
    auto [offset, size] = *entry;
    used_.erase(entry);
    auto next = free_.lower_bound(offset);
    if (next != free_.end() && next->first == offset + size) {
        size += next->second;
        next = free_.erase(next);
    }
    if (next != free_.begin()) {
        auto previous = std::prev(next);
        if (previous->first + previous->second == offset) {
            previous->second += size;
            return;
        }
    }
    free_[offset] = size;
}

void Arena::map_over(char* block, char* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto entry = used_.find(block - mapping_->data());
    const auto bytes = static_cast<size_t>(entry->second);
    if (reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(page_bytes()) != 0) {
        throw ArgumentError("address is not aligned to a page");
    }
    if (mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_.get(), entry->first) == MAP_FAILED) {
        throw OutOfMemory(format("shared memory: mapping a block of %.1f MiB a second time failed (%s)",
                                 static_cast<double>(bytes) / kMiB, std::strerror(errno)));
    }
    madvise(address, bytes, MADV_HUGEPAGE);
    madvise(address, bytes, MADV_DONTDUMP);
}

}  // namespace pycomm
