#include "transport/texts.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace pycomm {
namespace {

// Number of bytes of the UTF-8 character at `text`, 0 where there is none.
size_t character_at(const char* text, size_t room) {
    auto lead = static_cast<unsigned char>(*text);
    size_t length = lead < 0x80 ? 1 : lead >> 5 == 6 ? 2 : lead >> 4 == 14 ? 3 : lead >> 3 == 30 ? 4 : 0;
    if (length > room || lead == 0xC0 || lead == 0xC1 || lead > 0xF4) return 0;
    // Longer than need be, half of a surrogate pair, or beyond the last character.
    auto second = static_cast<unsigned char>(length > 1 ? text[1] : 0);
    if ((lead == 0xE0 && second < 0xA0) || (lead == 0xF0 && second < 0x90)) return 0;
    if ((lead == 0xED && second > 0x9F) || (lead == 0xF4 && second > 0x8F)) return 0;
    for (size_t i = 1; i < length; ++i) {
        if ((text[i] & 0xC0) != 0x80) return 0;
    }
    return length;
}

}  // namespace

std::string text_of(const char* from, size_t room) {
    char copy[512];
    room = std::min(room, sizeof copy);
    std::memcpy(copy, from, room);
    room = strnlen(copy, room);
    std::string text;
    for (size_t i = 0; i < room;) {
        size_t length = character_at(copy + i, room - i);
        text += length == 0 ? std::string("?") : std::string(copy + i, length);
        i += std::max<size_t>(1, length);
    }
    return text;
}

void copy_text(char* to, size_t room, const std::string& text) {
    size_t length = std::min(room - 1, text.size());
    while (length < text.size() && length > 0 && (text[length] & 0xC0) == 0x80) --length;  // no half of a character
    std::memcpy(to, text.data(), length);
    to[length] = '\0';
}

std::string describe(const Operation& operation, const std::string& algorithm) {
    constexpr const char* kKinds[] = {
        "all_reduce", "reduce_scatter", "all_gather", "broadcast",    "barrier",         "",
        "all_reduce", "all_to_all",     "reduce",     "all_to_all_v", "reduce_scatter_v"};
    const char* op = name_of(operation.op);
    std::string kind = kKinds[static_cast<int>(operation.kind)];
    const char* of_what = operation.tag == 0 ? name_of(operation.dtype) : "bytes of another dtype";
    std::string what = format("%lld elements of %s", static_cast<long long>(operation.count), of_what);
    switch (operation.kind) {
        case Kind::kAllReduce:
        case Kind::kReduceScatter:
            return kind + "(" + what + ", op=\"" + op + "\")";
        case Kind::kProgram:
            return kind + "(" + what + ", op=\"" + op + "\", algorithm=\"" + algorithm +
                   format("\" with digest %016llx)", static_cast<unsigned long long>(operation.schedule));
        case Kind::kReduce:
            return kind + "(" + what + format(", dst=%d, op=\"%s\")", operation.root, op);
        case Kind::kReduceScatterV:  // its counts are compared later
            return kind + "(" + of_what + ", op=\"" + op + "\")";
        case Kind::kBroadcast:
            return kind + "(" + what + format(", src=%d)", operation.root);
        case Kind::kAllGather:
        case Kind::kAllToAll:
            return kind + "(" + what + ")";
        default:
            return kind + "()";
    }
}

}  // namespace pycomm
