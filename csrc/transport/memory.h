// Memory of the machine, as the kernel accounts for it.
#pragma once

#include <cstdint>
#include <string>

namespace pycomm {

// Bytes of a page. 4 KiB on x86-64; on aarch64 the kernel's configuration decides between that, 16 and 64 KiB.
int64_t page_bytes();

// `bytes` rounded up to whole pages, as mmap requires it for offsets and lengths.
inline int64_t whole_pages(int64_t bytes) { return (bytes + page_bytes() - 1) / page_bytes() * page_bytes(); }

// Bytes of memory this process may still use, as far as the kernel and its control groups (versions 1 and 2, all
// levels) say. `root` is prepended to the paths of the system's files, for tests.
int64_t available_memory(const std::string& root = "");

}  // namespace pycomm
