#include "bindings.h"

namespace glimmer {

void bind_session(pybind11::module_&) {}

}  // namespace glimmer
