// The part of DLPack 1's C interface (github.com/dmlc/dlpack) that is used here. Its layout does not change within a
// major version.
#pragma once

#include <cstdint>

namespace pycomm {

struct DLDevice {
    int32_t type;
    int32_t id;
};

struct DLDataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct DLTensor {
    void* data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};

// The table of functions that a library offers as `__dlpack_c_exchange_api__` of its array type, in a capsule.
// Functions that are not called here are declared as plain pointers.
struct DLPackExchangeAPI {
    struct {
        uint32_t major, minor;
        void* previous;
    } header;
    void (*managed_tensor_allocator)();
    void (*managed_tensor_from_py_object_no_sync)();
    void (*managed_tensor_to_py_object_no_sync)();
    int (*dltensor_from_py_object_no_sync)(void* object, DLTensor* out);
    void (*current_work_stream)();
};

// torch's; null where torch has none (before 2.10), or one of another major version.
const DLPackExchangeAPI* torchs_table();

}  // namespace pycomm
