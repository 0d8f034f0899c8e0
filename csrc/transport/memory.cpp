#include "transport/memory.h"

#include <algorithm>
#include <fstream>

namespace pycomm {
namespace {

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

// Bytes that one control group leaves, INT64_MAX where it has no limit.
int64_t left_in(const std::string& directory, const char* limit_file, const char* usage_file, const char* cached_key) {
    int64_t limit = number_in(directory + "/" + limit_file);
    int64_t usage = number_in(directory + "/" + usage_file);
    if (limit < 0 || usage < 0) return INT64_MAX;
    int64_t reclaimable = field_of(directory + "/memory.stat", cached_key);
    return limit - usage + std::max<int64_t>(reclaimable, 0);
}

// The least that the group at `path` and those around it leave.
template <class Left>
int64_t least_on_the_way_up(std::string path, Left&& left) {
    int64_t least = INT64_MAX;
    while (true) {
        least = std::min(least, left(path == "/" ? "" : path));
        size_t slash = path.rfind('/');
        if (path.empty() || path == "/" || slash == std::string::npos) return least;
        path.resize(slash);
    }
}

int64_t left_in_control_groups(const std::string& root) {
    std::ifstream membership(root + "/proc/self/cgroup");
    const std::string mounted = root + "/sys/fs/cgroup";
    int64_t least = INT64_MAX;
    std::string line;
    while (std::getline(membership, line)) {  // hierarchy:controllers:path
        size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        std::string controllers = line.substr(first, second - first) + ":";
        std::replace(controllers.begin(), controllers.end(), ',', ':');
        std::string path = line.substr(second + 1);
        if (controllers == "::") {
            least = std::min(least, least_on_the_way_up(path, [&](const std::string& group) {
                                 return left_in(mounted + group, "memory.max", "memory.current", "inactive_file");
                             }));
        } else if (controllers.find(":memory:") != std::string::npos) {
            least = std::min(least, least_on_the_way_up(path, [&](const std::string& group) {
                                 return left_in(mounted + "/memory" + group, "memory.limit_in_bytes",
                                                "memory.usage_in_bytes", "total_inactive_file");
                             }));
        }
    }
    return least;
}

}  // namespace

int64_t available_memory(const std::string& root) {
    int64_t kilobytes = field_of(root + "/proc/meminfo", "MemAvailable:");
    int64_t system = kilobytes < 0 ? INT64_MAX : kilobytes * 1024;
    return std::max<int64_t>(0, std::min(system, left_in_control_groups(root)));
}

}  // namespace pycomm
