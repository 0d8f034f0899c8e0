#include "kernels/scatter_add.h"

#include <cstring>
#include <type_traits>

#include "base/error.h"
#include "kernels/cpu/elements.h"

namespace pycomm {
namespace {

template <class Out, class Value>
void scatter(char* out, const char* indices, const char* values, int64_t count, double scale) {
    using Wide = std::conditional_t<std::is_same_v<Out, double> || std::is_same_v<Value, double>, double, float>;
    Wide factor = static_cast<Wide>(scale);
    for (int64_t j = 0; j < count; ++j) {
        int64_t i = load_element<int32_t>(indices, j);
        Wide term = static_cast<Wide>(widen(load_element<Value>(values, j))) * factor;
        Out sum = narrow<Out>(static_cast<Wide>(widen(load_element<Out>(out, i))) + term);
        store_element(out, i, sum);
    }
}

}  // namespace

void scatter_add(const Buffer& out, const int32_t* indices, const Buffer& values, double scale) {
    const char* raw = reinterpret_cast<const char*>(indices);
    for (int64_t j = 0; j < values.count; ++j) {
        int64_t i = load_element<int32_t>(raw, j);
        if (i < 0 || i >= out.count) {
            throw ArgumentError(format("indices[%lld] is %lld, wanted 0 <= index < %lld", static_cast<long long>(j),
                                       static_cast<long long>(i), static_cast<long long>(out.count)));
        }
    }
    with_float_type(out.dtype, [&](auto o) {
        with_float_type(values.dtype, [&](auto v) {
            scatter<decltype(o), decltype(v)>(out.bytes(), raw, values.bytes(), values.count, scale);
        });
    });
}

}  // namespace pycomm
