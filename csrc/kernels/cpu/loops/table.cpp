#include "kernels/cpu/loops/members.h"

#define PYCOMM_TEXT_OF(x) #x
#define PYCOMM_TEXT(x) PYCOMM_TEXT_OF(x)

namespace pycomm::PYCOMM_ISA {

extern const Loops kLoops;
const Loops kLoops = {PYCOMM_TEXT(PYCOMM_ISA),
                      convert,
                      copy,
                      accumulate,
                      absmax,
                      hash,
                      squares,
                      step,
                      reduce,
                      collect,
                      count_above,
                      pack_indices,
                      unpack_indices,
                      quantize,
                      dequantize,
                      requantize,
                      pack_signs,
                      unpack_signs,
                      {thin_rows<float>, thin_columns<float>, thin_outer<float>},
                      {thin_rows<double>, thin_columns<double>, thin_outer<double>}};

}  // namespace pycomm::PYCOMM_ISA
