#pragma once

#include <pybind11/pybind11.h>

namespace glimmer {

void bind_session(pybind11::module_& m);

}  // namespace glimmer
