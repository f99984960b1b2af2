// The ops of this library, as the runtime sees them: by name, for the selected ISA.
#pragma once

#include <string>
#include <vector>

#include "glimmer/op.h"

namespace glimmer {

const char* isa_name(Isa isa);

// ISAs that this library has kernels for, weakest first; always starts with Scalar.
std::vector<Isa> compiled_isas();
// Those of them that this machine can run.
std::vector<Isa> available_isas();

// The ISA in use: the best available, or what GLIMMER_CPU_ISA or select_isa() asked for.
Isa selected_isa();
// Accepts "scalar", "avx2", "avx512" or "auto"; an error when unknown or when the CPU lacks it.
Status select_isa(const std::string& name);
// The error that GLIMMER_CPU_ISA caused at load, if any.
const Status& isa_status();

// Number of ops, in an order fixed at load, and the i-th one's name.
int op_count();
const char* op_name(int i);
int find_op(std::string_view name);  // -1 when unknown
// The kernel of op i for the selected ISA (or the best weaker one that exists).
const OpKernel& op_kernel(int i);

bool exact_mode();
void set_exact_mode(bool exact);  // initially GLIMMER_EXACT=1

}  // namespace glimmer
