// kquant_embedding: decoded rows of an encoded matrix, by index.
#include "kquant_decode.h"

namespace glimmer::GLIMMER_ISA_NS {
namespace {

Status check(const Tensor& ids, const Tensor& weight, std::string_view qtype, QMatrix& w) {
  GLIMMER_RETURN_IF_ERROR(expect_dtype(ids, DType::I64));
  GLIMMER_RETURN_IF_ERROR(expect_dims(ids, 1));
  GLIMMER_RETURN_IF_ERROR(parse_qtype("qtype", qtype, w.type));
  GLIMMER_RETURN_IF_ERROR(check_qrows(weight));
  const QTypeInfo& q = info(w.type);
  w.stride = weight.size(1);
  GLIMMER_RETURN_IF_ERROR(
      expect(w.stride > 0 && w.stride % q.bytes == 0, weight,
             "rows of a multiple of " + std::to_string(q.bytes) + " bytes for " + q.name));
  w.data = weight.ptr<const uint8_t>();
  w.n = weight.size(0);
  w.k = w.stride / q.bytes * q.block;
  return {};
}

Status infer(const Tensor& ids, const Tensor& weight, std::string_view qtype, Shape& out) {
  QMatrix w;
  GLIMMER_RETURN_IF_ERROR(check(ids, weight, qtype, w));
  out = shape_of(DType::F32, {ids.size(0), w.k});
  return {};
}

Status check_ids(const Tensor& ids, int64_t n) {
  const int64_t* id = ids.ptr<const int64_t>();
  for (int64_t t = 0; t < ids.size(0); ++t)
    if (id[t] < 0 || id[t] >= n)
      return Status::error("ids: expected ids in [0, " + std::to_string(n) + "), found " +
                           std::to_string(id[t]) + " at " + std::to_string(t));
  return {};
}

Status run(const Context& ctx, const Tensor& ids, const Tensor& weight, std::string_view qtype,
           Tensor& out) {
  QMatrix w;
  GLIMMER_RETURN_IF_ERROR(check(ids, weight, qtype, w));
  GLIMMER_RETURN_IF_ERROR(check_ids(ids, w.n));
  const DecodeFn decode_row = decoder(w.type);
  const int64_t* id = ids.ptr<const int64_t>();
  ctx.parallel(ids.size(0), std::max<int64_t>(1, 32768 / w.k), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) decode_row(w.row(id[t]), w.k, out.ptr<float>() + t * w.k);
  });
  return {};
}

}  // namespace
GLIMMER_CPU_OP(kquant_embedding, infer, run, "ids", "weight", "qtype")
}  // namespace glimmer::GLIMMER_ISA_NS
