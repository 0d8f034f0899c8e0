#include "transport/program.h"

#include <algorithm>

#include "base/error.h"

namespace pycomm {
namespace {

constexpr int64_t kHeaderWords = 3;
constexpr int64_t kRowWords = 7;

void require(bool good, const char* what) {
    if (!good) throw ArgumentError(format("program: %s is out of range", what));
}

}  // namespace

bool Program::has_conflicts() const {
    return std::any_of(sends.begin(), sends.end(), [](const Send& send) { return send.conflict; });
}

Program parse_program(const int64_t* words, int64_t num_words, int rank, int size) {
    require(num_words >= kHeaderWords, "its length");
    const int64_t num_sends = words[1], num_receives = words[2];
    require(words[0] >= 1, "the number of chunks");
    const int64_t room = (num_words - kHeaderWords) / kRowWords;
    require(num_sends >= 0 && num_sends <= room && num_receives >= 0 && num_receives <= room, "its length");
    require(num_words == kHeaderWords + (num_sends + num_receives) * kRowWords, "its length");
    Program program{rank, size, words[0], {}, {}};
    auto check = [&](const int64_t* row) {
        require(row[0] >= 0 && row[0] < size && row[0] != rank, "a peer");
        require(row[1] >= 0 && row[2] >= 1 && row[2] <= program.num_chunks && row[1] <= program.num_chunks - row[2],
                "a chunk");
    };
    const int64_t* row = words + kHeaderWords;
    for (int64_t i = 0; i < num_sends; ++i, row += kRowWords) {
        check(row);
        require(row[5] >= 0 && row[5] <= num_receives && row[6] >= 0 && row[6] <= i, "what a send waits for");
        program.sends.push_back({static_cast<int>(row[0]), row[1], row[2], row[3] != 0, row[4] != 0, row[5], row[6]});
    }
    for (int64_t i = 0; i < num_receives; ++i, row += kRowWords) {
        check(row);
        require(row[5] >= 0 && row[5] <= num_sends && row[6] >= 0 && row[6] <= num_sends, "what a receive waits for");
        program.receives.push_back(
            {static_cast<int>(row[0]), row[1], row[2], row[3] != 0, row[4] != 0, row[5], row[6]});
    }
    return program;
}

}  // namespace pycomm
