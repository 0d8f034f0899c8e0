#include "transport/memory.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "transport/control_groups.h"

namespace pycomm {
namespace {

// The number after `key` in a file of "key value" lines, -1 if there is none.
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

// Bytes that one control group still allows, INT64_MAX if it has no limit.
int64_t left_in(const std::string& directory, const char* limit_file, const char* usage_file, const char* cached_key) {
    int64_t limit = number_in(directory + "/" + limit_file);
    int64_t usage = number_in(directory + "/" + usage_file);
    if (limit < 0 || usage < 0) return INT64_MAX;
    int64_t reclaimable = field_of(directory + "/memory.stat", cached_key);
    return limit - usage + std::max<int64_t>(reclaimable, 0);
}

int64_t left_in_control_groups(const std::string& root) {
    int64_t least = INT64_MAX;
    for_each_control_group(root, "self", "memory", [&](const std::string& directory, bool is_unified) {
        least = std::min(least, is_unified ? left_in(directory, "memory.max", "memory.current", "inactive_file")
                                           : left_in(directory, "memory.limit_in_bytes", "memory.usage_in_bytes",
                                                     "total_inactive_file"));
    });
    return least;
}

}  // namespace

int64_t page_bytes() {
    static const int64_t bytes = sysconf(_SC_PAGESIZE);
    return bytes;
}

int64_t available_memory(const std::string& root) {
    int64_t kilobytes = field_of(root + "/proc/meminfo", "MemAvailable:");
    int64_t system = kilobytes < 0 ? INT64_MAX : kilobytes * 1024;
    return std::max<int64_t>(0, std::min(system, left_in_control_groups(root)));
}

}  // namespace pycomm
