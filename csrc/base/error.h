// The exceptions of the library below Python. bindings/errors.cpp says what each becomes there.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace pycomm {

// A value the caller passed is wrong: ValueError.
struct ArgumentError : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// The type of what the caller passed is wrong: TypeError.
struct ArgumentTypeError : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// The machine has less memory than asked for: MemoryError.
struct OutOfMemory : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The GPU, its driver or one of its libraries is missing, or failed: RuntimeError.
struct DeviceError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A peer or the link to it failed: pycomm.CommError.
struct CommFailure : std::runtime_error {
    CommFailure(int at, int from, std::string during, double waited, const std::string& what)
        : std::runtime_error(what), rank(at), peer(from), operation(std::move(during)), elapsed(waited) {}
    int rank;
    int peer;  // -1: no single peer
    std::string operation;
    double elapsed;  // seconds waited
};

[[gnu::format(printf, 1, 2)]] inline std::string format(const char* pattern, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, pattern);
    std::vsnprintf(text, sizeof text, pattern, arguments);
    va_end(arguments);
    return text;
}

}  // namespace pycomm
