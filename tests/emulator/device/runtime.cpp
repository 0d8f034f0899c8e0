// The host's version of csrc/device/runtime.cpp. Device memory is the host's; what lies where is told by the tests.
#include "device/runtime.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "device/capture.h"
#include "device/launch.h"
#include "emulator.h"

namespace pycomm::device {
namespace {

struct Range {
    const char* end;
    int device;
};
std::mutex guard;
std::map<const char*, Range> memory;  // by where it begins
thread_local int current = 0;
int64_t calls_elsewhere = 0;  // on an event of another device than the current one
bool stalled = false;         // whether events recorded from now on ever happen
int64_t fills = 0;            // of memory, so far
std::set<int> loaded;         // devices that all kernels are loaded on
int64_t unloaded_launches = 0;
int64_t good_launches = -1;  // how many go well before the one that fails; negative: all do

struct FakeEvent {
    bool happens;
    Stream stream;
    int64_t capture;
    int device;
};
std::vector<std::pair<Stream, Stream>> waits;  // the second was told to wait for the first

}  // namespace

int count() { return 2; }
std::string why_none() { return ""; }
int driver_version() { return 13000; }

int device_of(const void* pointer) {
    std::lock_guard lock(guard);
    auto at = static_cast<const char*>(pointer);
    auto after = memory.upper_bound(at);
    if (after == memory.begin()) return -1;
    const Range& range = std::prev(after)->second;
    return at <= range.end ? range.device : -1;
}

int num_multiprocessors(int) { return emulator::settings().multiprocessors; }

int exchange_current(int device) { return std::exchange(current, device); }
void set_current(int device) noexcept { current = device; }

void fill_bytes(void* where, int value, int64_t num_bytes, Stream stream) {
    auto fill = [=] {
        ++fills;
        std::memset(where, value, static_cast<size_t>(num_bytes));
    };
    if (!capture::takes(stream, fill)) fill();
}
void synchronize(Stream stream) {
    if (capture::of(stream) != 0) {
        capture::forbid("waiting for the device", "cudaErrorStreamCaptureUnsupported", capture::of(stream));
    }
    capture::require_safe("waiting for the device");
}

bool is_capturing(Stream stream) { return capture::of(stream) != 0; }
RelaxedCapture::RelaxedCapture() noexcept : previous_(capture::exchange_mode(capture::kRelaxed)) {}
RelaxedCapture::~RelaxedCapture() { capture::exchange_mode(static_cast<capture::Mode>(previous_)); }

std::vector<const void*>& kernels() {
    static std::vector<const void*> all;
    return all;
}
bool are_kernels_loaded(int device) {
    std::lock_guard lock(guard);
    return loaded.count(device) != 0;
}
void load_kernels(int device) {
    std::lock_guard lock(guard);
    loaded.insert(device);
}
void detail::note_launch() {
    std::lock_guard lock(guard);
    if (loaded.count(current) == 0) ++unloaded_launches;
}

Stream make_stream(int) {
    capture::require_safe("making a stream");
    return new char;
}

Event make_event() { return new FakeEvent{true, nullptr, 0, current}; }
void destroy_event(Event event) {
    if (static_cast<FakeEvent*>(event)->device != current) ++calls_elsewhere;
    delete static_cast<FakeEvent*>(event);
}
void record(Event event, Stream stream) {
    *static_cast<FakeEvent*>(event) = {!stalled, stream, capture::of(stream), current};
}
void wait_for(Stream stream, Event event) {
    auto moment = static_cast<FakeEvent*>(event);
    capture::join(stream, moment->capture, moment->stream);
    std::lock_guard lock(guard);
    waits.emplace_back(moment->stream, stream);
}
bool has_happened(Event event) {
    capture::require_safe("querying an event");
    auto moment = static_cast<FakeEvent*>(event);
    if (moment->device != current) ++calls_elsewhere;
    if (moment->capture != 0) capture::forbid("querying an event", "cudaErrorCapturedEvent", moment->capture);
    return moment->happens || !stalled;
}

void* allocate_mapped(int64_t num_bytes) {
    capture::require_safe("allocating host memory");
    return std::calloc(1, static_cast<size_t>(num_bytes));
}

bool detail::fails() {
    std::lock_guard lock(guard);
    return good_launches >= 0 && good_launches-- == 0;
}

bool sync_wanted() {
    const char* value = std::getenv("PYCOMM_SYNC");
    return value != nullptr && std::strcmp(value, "1") == 0;
}

}  // namespace pycomm::device

// What the tests call, through ctypes.
extern "C" {
[[gnu::visibility("default")]] void emulator_configure(uint64_t seed, int threads_per_block, int resident_blocks,
                                                       int multiprocessors) {
    emulator::settings() = {seed, threads_per_block, resident_blocks, multiprocessors};
}
[[gnu::visibility("default")]] void emulator_own(const char* begin, int64_t num_bytes, int device) {
    std::lock_guard lock(pycomm::device::guard);
    pycomm::device::memory[begin] = {begin + num_bytes, device};
}
[[gnu::visibility("default")]] void emulator_disown(const char* begin) {
    std::lock_guard lock(pycomm::device::guard);
    pycomm::device::memory.erase(begin);
}
// The wait number `i` since the last emulator_forget_waits(): false if there were not so many.
[[gnu::visibility("default")]] bool emulator_wait(int64_t i, void** first, void** waiting) {
    std::lock_guard lock(pycomm::device::guard);
    if (i >= static_cast<int64_t>(pycomm::device::waits.size())) return false;
    std::tie(*first, *waiting) = pycomm::device::waits[static_cast<size_t>(i)];
    return true;
}
[[gnu::visibility("default")]] void emulator_forget_waits() {
    std::lock_guard lock(pycomm::device::guard);
    pycomm::device::waits.clear();
}
[[gnu::visibility("default")]] int64_t emulator_num_launches() { return emulator::num_launches(); }
[[gnu::visibility("default")]] int64_t emulator_num_kernels() {
    return static_cast<int64_t>(pycomm::device::kernels().size());
}
[[gnu::visibility("default")]] int64_t emulator_num_unloaded_launches() { return pycomm::device::unloaded_launches; }
[[gnu::visibility("default")]] int64_t emulator_num_calls_elsewhere() { return pycomm::device::calls_elsewhere; }
[[gnu::visibility("default")]] int64_t emulator_num_fills() { return pycomm::device::fills; }
// Of the launches from now on, number `i` fails, as for lack of resources.
[[gnu::visibility("default")]] void emulator_fail_launch(int64_t i) { pycomm::device::good_launches = i; }
[[gnu::visibility("default")]] void emulator_stall(bool on) { pycomm::device::stalled = on; }
}
