#include "device/capture.h"

#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"

namespace pycomm::capture {
namespace {

struct Graph {
    Stream origin = nullptr;
    Mode mode = kGlobal;
    std::thread::id thread;
    bool is_open = true, is_valid = true;
    std::set<Stream> streams;   // that take part
    std::set<Stream> unjoined;  // that the others have not waited for since
    std::vector<std::function<void()>> work;
};

std::recursive_mutex guard;
std::map<int64_t, Graph> graphs;  // from 1
thread_local Mode current = kGlobal;

bool concerns_this_thread(const Graph& graph) {
    if (!graph.is_open || graph.mode == kRelaxed || current == kRelaxed) return false;
    if (graph.thread == std::this_thread::get_id()) return true;
    return current == kGlobal && graph.mode == kGlobal;
}

}  // namespace

Mode exchange_mode(Mode mode) { return std::exchange(current, mode); }

int64_t of(Stream stream) {
    std::lock_guard lock(guard);
    for (const auto& [number, graph] : graphs) {
        if (graph.is_open && graph.streams.count(stream) != 0) return number;
    }
    return 0;
}

bool takes(Stream stream, std::function<void()> work) {
    std::lock_guard lock(guard);
    int64_t capture = of(stream);
    if (capture == 0) return false;
    graphs[capture].work.push_back(std::move(work));
    if (stream != graphs[capture].origin) graphs[capture].unjoined.insert(stream);
    return true;
}

void require_safe(const char* what) {
    std::lock_guard lock(guard);
    bool safe = true;
    for (auto& [number, graph] : graphs) {
        if (!concerns_this_thread(graph)) continue;
        graph.is_valid = safe = false;
    }
    if (!safe) forbid(what, "cudaErrorStreamCaptureUnsupported", 0);
}

void join(Stream stream, int64_t capture_of_event, Stream recorded_on) {
    std::lock_guard lock(guard);
    int64_t mine = of(stream);
    if (mine == capture_of_event && mine == 0) return;
    if (mine != 0 && mine != capture_of_event) forbid("letting a stream wait", "cudaErrorStreamCaptureIsolation", mine);
    auto at = graphs.find(capture_of_event);
    if (!at->second.is_open) forbid("letting a stream wait", "cudaErrorCapturedEvent", 0);
    Graph& graph = at->second;
    graph.streams.insert(stream);
    if (stream != recorded_on) graph.unjoined.erase(recorded_on);
    if (stream != graph.origin) graph.unjoined.insert(stream);
}

void forbid(const char* what, const char* error, int64_t capture) {
    std::lock_guard lock(guard);
    if (capture != 0) graphs[capture].is_valid = false;
    throw DeviceError(std::string(what) + ": operation not permitted when stream is capturing (" + error + ")");
}

}  // namespace pycomm::capture

// What the tests call, through ctypes.
extern "C" {
[[gnu::visibility("default")]] int64_t emulator_begin_capture(void* stream, int mode) {
    using namespace pycomm::capture;
    std::lock_guard lock(guard);
    auto number = static_cast<int64_t>(graphs.size()) + 1;
    Graph& graph = graphs[number];
    graph.origin = stream;
    graph.mode = static_cast<Mode>(mode);
    graph.thread = std::this_thread::get_id();
    graph.streams.insert(stream);
    return number;
}
// 0: the capture is valid; 1: it was invalidated; 2: a stream took part that the first one has not waited for.
[[gnu::visibility("default")]] int emulator_end_capture(int64_t number) {
    using namespace pycomm::capture;
    std::lock_guard lock(guard);
    Graph& graph = graphs.at(number);
    graph.is_open = false;
    if (!graph.is_valid) return 1;
    return graph.unjoined.empty() ? 0 : 2;
}
// Null, or what went wrong.
[[gnu::visibility("default")]] const char* emulator_launch_graph(int64_t number) {
    using namespace pycomm::capture;
    std::vector<std::function<void()>> work;
    {
        std::lock_guard lock(guard);
        work = graphs.at(number).work;
    }
    static thread_local std::string problem;
    try {
        for (const auto& step : work) step();
    } catch (const std::exception& error) {
        problem = error.what();
        return problem.c_str();
    }
    return nullptr;
}
}
