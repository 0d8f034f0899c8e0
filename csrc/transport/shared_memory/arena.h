// One rank's shared memory: an anonymous file, mapped by every rank of the group.
//
//   | control | mailboxes | staging | arena ... |
//
// The file has no name, so nothing is left behind when its last holder dies, and no /dev/shm limit applies. Its pages
// are reserved (posix_fallocate) before use: a shortage is an error here and not a SIGBUS somewhere else. The address
// range is much larger than what is ever reserved, so that an arena can grow without involving the peers.
//
// In a forked child the owner's blocks are private: nobody else sees what the child writes. Until it writes to a page,
// it reads the parent's current data there. It cannot access the peers' files.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "base/descriptor.h"
#include "transport/at_fork.h"

namespace pycomm {

class Mapping {
   public:
    Mapping(const Descriptor& file, int64_t num_bytes);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    char* data() const { return data_; }
    int64_t num_bytes() const { return num_bytes_; }

    // For a forked child. Makes the first `private_bytes` private and the rest inaccessible: an access there ends the
    // process. The address range stays reserved.
    void withdraw(const Descriptor& file, int64_t private_bytes) noexcept;

   private:
    char* data_;
    int64_t num_bytes_;
};

// The allocator of this rank's own file. Blocks may outlive the group: they keep the mapping.
class Arena final : private ForkAware {
   public:
    // Bytes [0, begin), whole pages, are reserved at once and never handed out.
    Arena(Descriptor file, int64_t num_bytes, int64_t begin);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // Returns a page-aligned block of at least one page. Throws OutOfMemory saying what was needed and found.
    char* allocate(int64_t num_bytes);
    void release(char* block);
    // Maps the pages of `block` a second time, at `address`, replacing what is mapped there; each mapping is valid
    // until it is unmapped. The caller owns the mapping at `address`, which is as long as the block. Not private after
    // a fork.
    void map_over(char* block, char* address);

    char* data() const { return mapping_->data(); }
    // May outlive the arena.
    const std::shared_ptr<Mapping>& mapping() const { return mapping_; }

   private:
    void reserve(int64_t end, int64_t wanted);
    void before_fork() override { mutex_.lock(); }
    void after_fork_in_parent() override { mutex_.unlock(); }
    void after_fork_in_child() override;

    Descriptor file_;
    std::shared_ptr<Mapping> mapping_;
    std::mutex mutex_;
    std::map<int64_t, int64_t> free_;  // offset -> bytes, no two adjacent
    std::map<int64_t, int64_t> used_;
    int64_t reserved_ = 0;  // bytes [0, reserved_) have their pages
};

}  // namespace pycomm
