// A model that is an ExecuTorch program: model.pte with its methods and pools, model.ptd with its
// weights.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model.h"

namespace glimmer {

// Loads and checks both files; throws std::invalid_argument for a bad file, naming it, and
// std::runtime_error for a program that is not ours. `ptd` may be empty: weights inside the .pte.
// `trace` says what Model::take_trace() gives.
std::unique_ptr<Model> load_program(const std::string& pte, const std::string& ptd,
                                    TraceKind trace = TraceKind::None);

}  // namespace glimmer
