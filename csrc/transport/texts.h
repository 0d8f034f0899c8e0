// Text that travels between ranks: why a rank gave up or refused, what it called.
#pragma once

#include <cstddef>
#include <string>

#include "transport/operation.h"

namespace pycomm {

// Text of at most `room` bytes that a peer wrote there, or is just writing; printable in Python.
std::string text_of(const char* from, size_t room);
// Writes as much of `text` as fits, ended by a 0.
void copy_text(char* to, size_t room, const std::string& text);
// The call that an announcement stands for, for errors.
std::string describe(const Operation& operation, const std::string& algorithm);

}  // namespace pycomm
