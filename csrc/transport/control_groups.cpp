#include "transport/control_groups.h"

#include <algorithm>
#include <fstream>

namespace pycomm {

int64_t number_in(const std::string& path) {
    std::ifstream file(path);
    int64_t value;
    return file >> value ? value : -1;
}

void for_each_control_group(const std::string& root, const std::string& pid, const std::string& controller,
                            const std::function<void(const std::string& directory, bool is_unified)>& visit) {
    std::ifstream membership(root + "/proc/" + pid + "/cgroup");
    std::string line;
    while (std::getline(membership, line)) {  // hierarchy:controllers:path
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        std::string controllers = line.substr(first, second - first) + ":";
        std::replace(controllers.begin(), controllers.end(), ',', ':');
        const bool is_unified = controllers == "::";
        if (!is_unified && controllers.find(":" + controller + ":") == std::string::npos) continue;
        const std::string mounted = root + "/sys/fs/cgroup" + (is_unified ? "" : "/" + controller);
        std::string path = line.substr(second + 1);
        while (true) {
            visit(mounted + (path == "/" ? "" : path), is_unified);
            const size_t slash = path.rfind('/');
            if (path.empty() || path == "/" || slash == std::string::npos) break;
            path.resize(slash);
        }
    }
}

}  // namespace pycomm
