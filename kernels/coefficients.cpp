#include "kernels/newton_schulz.h"

namespace dmuon {}
