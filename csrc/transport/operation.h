// What a rank calls, as it announces it to the others.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/dtype.h"
#include "kernels/reduce_op.h"

namespace pycomm {

enum class Kind : uint8_t {
    kAllReduce,
    kReduceScatter,
    kAllGather,
    kBroadcast,
    kBarrier,
    kRefused,
    kProgram,
    kAllToAll,
    kReduce,
    kAllToAllV,
    kReduceScatterV
};

inline constexpr int64_t kAgreedBytes = 24;  // of an Operation, from the beginning

// An announcement. Everything before `offset` must agree on all ranks.
struct Operation {
    Kind kind;
    DType dtype = DType::kU8;
    ReduceOp op = ReduceOp::kSum;
    uint8_t tag = 0;  // see Buffer
    int32_t root = 0;
    int64_t count = 0;      // of the elements of x
    uint64_t schedule = 0;  // for kProgram: digest of the schedule, equal on all ranks
    int64_t offset = -1;    // of x in the announcing rank's file; -1: x lies elsewhere
    int64_t shadow = -1;    // for kProgram: offset of the array's shadow, see transport/shared_memory/run.cpp
    int16_t staging = 0;    // how to stage; all ranks follow rank 0: see staging.h
    int16_t is_apart = 0;   // 1: this rank's input for its own share lies outside x
    float slack = -1.0f;    // this rank's usual wait for others, in seconds; -1: ranks outnumber cores, see shares.h

    // Bytes per element of the arrays at `offset` and `shadow`. A program computes means of half types in float.
    int64_t array_width() const {
        bool widened = kind == Kind::kProgram && op == ReduceOp::kMean && size_of(dtype) == 2;
        return widened ? size_of(DType::kF32) : size_of(dtype);
    }
    bool agrees_with(const Operation& other) const { return std::memcmp(this, &other, kAgreedBytes) == 0; }
};
static_assert(sizeof(Operation) == 48);

// Whether the fields that agree on all ranks hold possible values; they may come from anywhere.
inline bool is_possible(const Operation& operation, int size) {
    if (operation.kind > Kind::kReduceScatterV || static_cast<int>(operation.dtype) >= kNumDTypes) return false;
    if (static_cast<int>(operation.op) >= kNumReduceOps || operation.count < 0) return false;
    const bool has_root = operation.kind == Kind::kBroadcast || operation.kind == Kind::kReduce;
    return !has_root || (operation.root >= 0 && operation.root < size);
}

}  // namespace pycomm
