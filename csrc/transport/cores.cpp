#include "transport/cores.h"

#include <sched.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <string>

#include "transport/control_groups.h"

namespace pycomm {
namespace {

constexpr size_t kMostCores = 8192;
using Cores = std::vector<bool>;

// The system's set of cores, for up to kMostCores.
class CoreSet {
   public:
    CoreSet() : set_(CPU_ALLOC(kMostCores)) {
        if (set_ != nullptr) CPU_ZERO_S(num_bytes(), set_);
    }
    ~CoreSet() {
        if (set_ != nullptr) CPU_FREE(set_);
    }
    CoreSet(const CoreSet&) = delete;
    CoreSet& operator=(const CoreSet&) = delete;

    bool read(pid_t pid) { return set_ != nullptr && sched_getaffinity(pid, num_bytes(), set_) == 0; }
    bool apply() const { return sched_setaffinity(0, num_bytes(), set_) == 0; }
    bool has(size_t core) const { return CPU_ISSET_S(core, num_bytes(), set_); }
    void add(size_t core) { CPU_SET_S(core, num_bytes(), set_); }
    void remove(size_t core) { CPU_CLR_S(core, num_bytes(), set_); }
    int count() const { return CPU_COUNT_S(num_bytes(), set_); }

   private:
    static size_t num_bytes() { return CPU_ALLOC_SIZE(kMostCores); }
    cpu_set_t* set_;
};

Cores cores_of(pid_t pid) {
    CoreSet set;
    Cores out;
    if (!set.read(pid)) return out;
    for (size_t core = 0; core < kMostCores; ++core) {
        if (!set.has(core)) continue;
        out.resize(core + 1, false);
        out[core] = true;
    }
    return out;
}

// Gives process i a core that no other has, moving others if need be (augmenting paths).
bool find_core(const std::vector<Cores>& usable, size_t i, std::vector<int>& owner, std::vector<bool>& tried) {
    for (size_t core = 0; core < usable[i].size(); ++core) {  // most often there is a free one
        if (!usable[i][core] || owner[core] >= 0) continue;
        owner[core] = static_cast<int>(i);
        return true;
    }
    for (size_t core = 0; core < usable[i].size(); ++core) {
        if (!usable[i][core] || tried[core]) continue;
        tried[core] = true;
        if (!find_core(usable, static_cast<size_t>(owner[core]), owner, tried)) continue;
        owner[core] = static_cast<int>(i);
        return true;
    }
    return false;
}

bool fit_their_affinities(const std::vector<pid_t>& peers) {
    const Cores own = cores_of(0);
    std::vector<Cores> usable = {own};
    size_t most = own.size();
    for (pid_t pid : peers) {
        Cores theirs = pid > 0 ? cores_of(pid) : own;
        usable.push_back(theirs.empty() ? own : theirs);
        most = std::max(most, usable.back().size());
    }
    std::vector<int> owner(most, -1);
    for (size_t i = 0; i < usable.size(); ++i) {
        std::vector<bool> tried(most, false);
        if (!find_core(usable, i, owner, tried)) return false;
    }
    return true;
}

// CPU time, in cores, that the control groups of a process allow.
struct Limit {
    double cores = std::numeric_limits<double>::infinity();
    std::string group;  // the one with the lowest limit
};

double cores_in(const std::string& directory, bool is_unified) {
    double quota = -1.0, period = 0.0;
    if (is_unified) {
        std::ifstream file(directory + "/cpu.max");
        if (!(file >> quota >> period)) return std::numeric_limits<double>::infinity();  // "max" is no number
    } else {
        quota = static_cast<double>(number_in(directory + "/cpu.cfs_quota_us"));
        period = static_cast<double>(number_in(directory + "/cpu.cfs_period_us"));
    }
    return quota > 0 && period > 0 ? quota / period : std::numeric_limits<double>::infinity();
}

Limit limit_of(const std::string& root, const std::string& pid) {
    Limit least;
    for_each_control_group(root, pid, "cpu", [&](const std::string& directory, bool is_unified) {
        const double cores = cores_in(directory, is_unified);
        if (cores < least.cores) least = {cores, directory};
    });
    return least;
}

bool fit_their_control_groups(const std::vector<pid_t>& peers, const std::string& root) {
    const Limit own = limit_of(root, "self");
    if (std::isinf(own.cores)) return true;
    int members = 1;
    for (pid_t pid : peers) {
        if (pid <= 0 || limit_of(root, std::to_string(pid)).group == own.group) ++members;
    }
    return members <= own.cores;
}

}  // namespace

bool have_a_core_each(const std::vector<pid_t>& peers, const std::string& root) {
    return fit_their_affinities(peers) && fit_their_control_groups(peers, root);
}

void leave_this_core() {
    CoreSet cores;
    const int here = sched_getcpu();
    if (here < 0 || !cores.read(0) || cores.count() < 2 || !cores.has(static_cast<size_t>(here))) return;
    cores.remove(static_cast<size_t>(here));
    if (!cores.apply()) return;
    cores.add(static_cast<size_t>(here));
    cores.apply();  // it may come back: the scheduler decides again
}

}  // namespace pycomm
