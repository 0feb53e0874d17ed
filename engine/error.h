// ConfigError, RuntimeFailure and message(): shared with the kernels, which know no engine.
#pragma once
#include "kernels/error.h"
