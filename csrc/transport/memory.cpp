#include "transport/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

#include "base/error.h"

namespace pycomm {
namespace {

constexpr int64_t kPage = 4096;
constexpr double kMiB = 1 << 20;

int64_t round_up(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// The number behind `key` in a file of "key value" lines, -1 if there is none.
int64_t field_of(const std::string& path, const std::string& key) {
    std::ifstream file(path);
    std::string word;
    int64_t value;
    while (file >> word) {
        if (word == key && file >> value) return value;
        file.ignore(1 << 12, '\n');
    }
    return -1;
}

int64_t number_in(const std::string& path) {
    std::ifstream file(path);
    int64_t value;
    return file >> value ? value : -1;  // "max" is no number
}

int64_t left_in_control_group() {
    std::ifstream membership("/proc/self/cgroup");
    std::string line;
    while (std::getline(membership, line)) {
        if (line.rfind("0::", 0) != 0) continue;
        std::string directory = "/sys/fs/cgroup" + line.substr(3);
        int64_t limit = number_in(directory + "/memory.max");
        int64_t current = number_in(directory + "/memory.current");
        int64_t reclaimable = field_of(directory + "/memory.stat", "inactive_file");
        if (limit >= 0 && current >= 0) return limit - current + std::max<int64_t>(reclaimable, 0);
    }
    return INT64_MAX;
}

}  // namespace

Mapping::Mapping(int fd, int64_t num_bytes) : num_bytes_(num_bytes) {
    void* data =
        mmap(nullptr, static_cast<size_t>(num_bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
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

int64_t available_memory() {
    int64_t kilobytes = field_of("/proc/meminfo", "MemAvailable:");
    int64_t system = kilobytes < 0 ? INT64_MAX : kilobytes * 1024;
    return std::max<int64_t>(0, std::min(system, left_in_control_group()));
}

Arena::Arena(int fd, int64_t num_bytes, int64_t begin) : fd_(fd), mapping_(fd, num_bytes) {
    try {
        reserve(begin, begin);
    } catch (...) {
        ::close(fd_);
        throw;
    }
    free_[begin] = num_bytes - begin;
}

Arena::~Arena() { ::close(fd_); }

void Arena::reserve(int64_t end, int64_t wanted) {
    if (end <= reserved_) return;
    int64_t found = available_memory();
    int error = end - reserved_ > found ? ENOMEM : posix_fallocate(fd_, reserved_, end - reserved_);
    if (error != 0) {
        throw OutOfMemory(format("shared memory: %.1f MiB needed for a block of %.1f MiB, %.1f MiB found (%s)",
                                 static_cast<double>(end - reserved_) / kMiB, static_cast<double>(wanted) / kMiB,
                                 static_cast<double>(found) / kMiB, std::strerror(error)));
    }
    reserved_ = end;
}

char* Arena::allocate(int64_t num_bytes) {
    int64_t size = std::max(kPage, round_up(num_bytes));
    std::lock_guard<std::mutex> lock(mutex_);
    auto hole = std::find_if(free_.begin(), free_.end(), [&](const auto& entry) { return entry.second >= size; });
    if (hole == free_.end()) {
        throw OutOfMemory(format("shared memory: %.1f MiB needed, the arena of %.0f MiB has no such hole left",
                                 static_cast<double>(size) / kMiB, static_cast<double>(mapping_.num_bytes()) / kMiB));
    }
    auto [offset, length] = *hole;
    reserve(offset + size, size);
    free_.erase(hole);
    if (length > size) free_[offset + size] = length - size;
    used_[offset] = size;
    return mapping_.data() + offset;
}

void Arena::release(char* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto entry = used_.find(block - mapping_.data());
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

int64_t Arena::offset_of(const void* pointer, int64_t num_bytes) const {
    int64_t offset = static_cast<const char*>(pointer) - mapping_.data();
    return offset >= 0 && offset + num_bytes <= mapping_.num_bytes() ? offset : -1;
}

}  // namespace pycomm
