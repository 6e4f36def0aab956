// XLA custom calls: checks shapes, hands buffers and XLA's own thread pool to the kernels.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace flashmoe {
namespace {

namespace ffi = xla::ffi;

class XlaThreads : public Executor {
 public:
  explicit XlaThreads(ffi::ThreadPool& pool) : pool_(pool), num_threads_(static_cast<size_t>(pool.num_threads())) {}
  size_t num_threads() const override { return num_threads_; }
  void schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool& pool_;
  size_t num_threads_;
};

size_t as_size(int64_t n) { return static_cast<size_t>(n); }

ffi::Error invalid(const std::string& message) { return ffi::Error::InvalidArgument("flashmoe kernels: " + message); }

template <class Body>
ffi::Error guarded(const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("flashmoe kernels: ") + error.what());
  }
}

bool dtype_of(ffi::DataType type, Dtype* dtype) {
  switch (type) {
    case ffi::DataType::BF16:
      *dtype = Dtype::kBfloat16;
      return true;
    case ffi::DataType::F16:
      *dtype = Dtype::kFloat16;
      return true;
    case ffi::DataType::F32:
      *dtype = Dtype::kFloat32;
      return true;
    default:
      return false;
  }
}

bool isa_of(int64_t value, Isa* isa) {
  *isa = static_cast<Isa>(value);
  return value >= 0 && value <= static_cast<int64_t>(Isa::kAvx512Bf16) && isa_supported(*isa);
}

ffi::Error matmul_call(ffi::ThreadPool pool, ffi::Buffer<ffi::DataType::F32> x, ffi::AnyBuffer kernel,
                       ffi::Result<ffi::Buffer<ffi::DataType::F32>> out, int64_t isa_value) {
  return guarded([&] {
    Isa isa;
    Dtype dtype;
    if (!isa_of(isa_value, &isa)) return invalid("this processor lacks the instruction set asked for");
    if (!dtype_of(kernel.element_type(), &dtype)) return invalid("a kernel is bfloat16, float16 or float32");
    const auto x_shape = x.dimensions(), kernel_shape = kernel.dimensions(), out_shape = out->dimensions();
    if (x_shape.size() != 2 || kernel_shape.size() != 2 || out_shape.size() != 2 || x_shape[1] != kernel_shape[1] ||
        out_shape[0] != x_shape[0] || out_shape[1] != kernel_shape[0]) {
      return invalid("matmul takes x [M, K], kernel [N, K] and returns [M, N]");
    }
    XlaThreads threads(pool);
    matmul(threads, isa, dtype, x.typed_data(), kernel.untyped_data(), out->typed_data(), as_size(x_shape[0]),
           as_size(kernel_shape[0]), as_size(x_shape[1]));
    return ffi::Error::Success();
  });
}

// What both expert calls check; fills isa and layout. Returns a message, empty if all is well.
struct ExpertAttributes {
  int64_t isa, dtype, hidden, gate_offset, up_offset, down_offset;
};

std::string read_layout(const ExpertAttributes& attributes, const ffi::AnyBuffer& records, int64_t width, Isa* isa,
                        ExpertLayout* layout) {
  if (!isa_of(attributes.isa, isa)) return "this processor lacks the instruction set asked for";
  if (attributes.dtype < 0 || attributes.dtype > static_cast<int64_t>(Dtype::kFloat32)) return "unknown weight dtype";
  const auto dtype = static_cast<Dtype>(attributes.dtype);
  if (records.element_type() != (dtype == Dtype::kFloat32 ? ffi::DataType::U32 : ffi::DataType::U16)) {
    return "records are uint16 words for 16-bit weights and uint32 words for float32";
  }
  if (records.dimensions().size() != 2) return "records are [rows, words]";
  for (const int64_t offset : {attributes.gate_offset, attributes.up_offset, attributes.down_offset}) {
    if (offset < 0 || attributes.hidden < 1 || width < 1 || offset + attributes.hidden * width > records.dimensions()[1]) {
      return "a matrix lies outside of its record";
    }
  }
  *layout = ExpertLayout{dtype,
                         as_size(width),
                         as_size(attributes.hidden),
                         as_size(attributes.gate_offset),
                         as_size(attributes.up_offset),
                         as_size(attributes.down_offset)};
  return "";
}

ffi::Error expert_ffn_call(ffi::ThreadPool pool, ffi::Buffer<ffi::DataType::F32> out_before,
                           ffi::Buffer<ffi::DataType::F32> x, ffi::AnyBuffer records,
                           ffi::Buffer<ffi::DataType::S32> row, ffi::Buffer<ffi::DataType::PRED> active,
                           ffi::Result<ffi::Buffer<ffi::DataType::F32>> out, int64_t isa_value, int64_t dtype,
                           int64_t hidden, int64_t gate_offset, int64_t up_offset, int64_t down_offset) {
  return guarded([&] {
    const auto x_shape = x.dimensions(), out_shape = out->dimensions();
    if (x_shape.size() != 2 || out_shape.size() != 3 || out_shape[0] != x_shape[0] || out_shape[2] != x_shape[1] ||
        row.element_count() != as_size(out_shape[0] * out_shape[1]) || active.element_count() != row.element_count()) {
      return invalid("expert_ffn takes out [T, X, D], x [T, D], row [T, X] and active [T, X]");
    }
    if (out_before.untyped_data() != out->untyped_data()) return invalid("out is not updated in place");
    Isa isa;
    ExpertLayout layout;
    const std::string wrong =
        read_layout({isa_value, dtype, hidden, gate_offset, up_offset, down_offset}, records, x_shape[1], &isa, &layout);
    if (!wrong.empty()) return invalid(wrong);
    for (size_t i = 0; i < row.element_count(); ++i) {
      if (active.typed_data()[i] && (row.typed_data()[i] < 0 || row.typed_data()[i] >= records.dimensions()[0])) {
        return invalid("a row is outside of the slot buffer");
      }
    }
    XlaThreads threads(pool);
    expert_ffn(threads, isa, layout, x.typed_data(), records.untyped_data(), as_size(records.dimensions()[1]),
               row.typed_data(), active.typed_data(), out->typed_data(), as_size(out_shape[0]), as_size(out_shape[1]));
    return ffi::Error::Success();
  });
}

ffi::Error expert_ffn_group_call(ffi::ThreadPool pool, ffi::Buffer<ffi::DataType::F32> sums_before,
                                 ffi::Buffer<ffi::DataType::F32> x, ffi::AnyBuffer records,
                                 ffi::Buffer<ffi::DataType::S32> row, ffi::Buffer<ffi::DataType::S32> token,
                                 ffi::Buffer<ffi::DataType::F32> weight,
                                 ffi::Result<ffi::Buffer<ffi::DataType::F32>> sums,
                                 ffi::Result<ffi::Buffer<ffi::DataType::F32>> done, int64_t isa_value, int64_t dtype,
                                 int64_t hidden, int64_t gate_offset, int64_t up_offset, int64_t down_offset) {
  return guarded([&] {
    const auto x_shape = x.dimensions(), sums_shape = sums->dimensions();
    if (x_shape.size() != 2 || sums_shape.size() != 2 || sums_shape[0] != x_shape[0] || sums_shape[1] != x_shape[1] ||
        row.element_count() != 1 || done->element_count() != 1 || token.element_count() != weight.element_count()) {
      return invalid("expert_ffn_group takes sums [T, D], x [T, D], one row, token [G] and weight [G]");
    }
    if (sums_before.untyped_data() != sums->untyped_data()) return invalid("sums are not updated in place");
    Isa isa;
    ExpertLayout layout;
    const std::string wrong =
        read_layout({isa_value, dtype, hidden, gate_offset, up_offset, down_offset}, records, x_shape[1], &isa, &layout);
    if (!wrong.empty()) return invalid(wrong);
    const int64_t row_id = row.typed_data()[0];
    if (row_id < 0 || row_id >= records.dimensions()[0]) return invalid("a row is outside of the slot buffer");
    const size_t record_bytes = as_size(records.dimensions()[1]) * (layout.dtype == Dtype::kFloat32 ? 4 : 2);
    const auto* record = static_cast<const unsigned char*>(records.untyped_data()) + as_size(row_id) * record_bytes;
    XlaThreads threads(pool);
    expert_ffn_group(threads, isa, layout, x.typed_data(), record, token.typed_data(), weight.typed_data(),
                     sums->typed_data(), as_size(x_shape[0]), token.element_count());
    done->typed_data()[0] = 0.0f;
    return ffi::Error::Success();
  });
}

ffi::Error attend_call(ffi::ThreadPool pool, ffi::Buffer<ffi::DataType::F32> q, ffi::AnyBuffer keys,
                       ffi::AnyBuffer values, ffi::Buffer<ffi::DataType::S32> position,
                       ffi::Result<ffi::Buffer<ffi::DataType::F32>> out, int64_t isa_value, int64_t dtype_value,
                       int64_t window) {
  return guarded([&] {
    Isa isa;
    if (!isa_of(isa_value, &isa)) return invalid("this processor lacks the instruction set asked for");
    if (dtype_value < 0 || dtype_value > static_cast<int64_t>(Dtype::kFloat32)) return invalid("unknown cache dtype");
    const auto dtype = static_cast<Dtype>(dtype_value);
    const auto words = dtype == Dtype::kFloat32 ? ffi::DataType::U32 : ffi::DataType::U16;
    if (keys.element_type() != words || values.element_type() != words) {
      return invalid("a cache is uint16 words of 16-bit floats or uint32 words of float32");
    }
    const auto q_shape = q.dimensions(), key_shape = keys.dimensions(), value_shape = values.dimensions();
    if (q_shape.size() != 4 || key_shape.size() != 4 || value_shape.size() != 4 || key_shape[0] != q_shape[0] ||
        key_shape[3] != q_shape[3] || key_shape[2] < 1 || q_shape[2] % key_shape[2] != 0 ||
        !std::equal(key_shape.begin(), key_shape.end(), value_shape.begin()) || window < 0 ||
        position.element_count() != as_size(q_shape[0] * q_shape[1]) || out->element_count() != q.element_count()) {
      return invalid("attend takes q [B, T, N, H], keys and values [B, S, K, H] and position [B, T]");
    }
    const AttentionShape shape{as_size(q_shape[0]),   as_size(q_shape[1]),   as_size(q_shape[2]), as_size(key_shape[1]),
                               as_size(key_shape[2]), as_size(key_shape[3]), as_size(window)};
    if (q.element_count() == 0) return ffi::Error::Success();
    XlaThreads threads(pool);
    attend(threads, isa, dtype, shape, q.typed_data(), keys.untyped_data(), values.untyped_data(),
           position.typed_data(), out->typed_data());
    return ffi::Error::Success();
  });
}

}  // namespace
}  // namespace flashmoe

// What the library shows to the outside.
#define FLASHMOE_PUBLIC __attribute__((visibility("default")))
extern "C" {
FLASHMOE_PUBLIC XLA_FFI_Error* flashmoe_matmul(XLA_FFI_CallFrame*);
FLASHMOE_PUBLIC XLA_FFI_Error* flashmoe_expert_ffn(XLA_FFI_CallFrame*);
FLASHMOE_PUBLIC XLA_FFI_Error* flashmoe_expert_ffn_group(XLA_FFI_CallFrame*);
FLASHMOE_PUBLIC XLA_FFI_Error* flashmoe_attend(XLA_FFI_CallFrame*);
// Read before anything is registered: JAX's CPU backend does not start with calls built for a newer interface.
FLASHMOE_PUBLIC int flashmoe_ffi_major() { return XLA_FFI_API_MAJOR; }
FLASHMOE_PUBLIC int flashmoe_ffi_minor() { return XLA_FFI_API_MINOR; }
FLASHMOE_PUBLIC int flashmoe_isa_supported(int isa) { return flashmoe::isa_supported(static_cast<flashmoe::Isa>(isa)); }
FLASHMOE_PUBLIC int flashmoe_best_isa() { return static_cast<int>(flashmoe::best_isa()); }
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(flashmoe_matmul, flashmoe::matmul_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()                        // kernel
                                  .Ret<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Attr<int64_t>("isa"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(flashmoe_expert_ffn, flashmoe::expert_ffn_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()   // out, updated in place
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()   // x
                                  .Arg<xla::ffi::AnyBuffer>()                         // records
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()   // row
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::PRED>>()  // active
                                  .Ret<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Attr<int64_t>("isa")
                                  .Attr<int64_t>("dtype")
                                  .Attr<int64_t>("hidden")
                                  .Attr<int64_t>("gate_offset")
                                  .Attr<int64_t>("up_offset")
                                  .Attr<int64_t>("down_offset"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(flashmoe_expert_ffn_group, flashmoe::expert_ffn_group_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()  // sums, updated in place
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()  // x
                                  .Arg<xla::ffi::AnyBuffer>()                        // records
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()  // row
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()  // token
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()  // weight
                                  .Ret<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Attr<int64_t>("isa")
                                  .Attr<int64_t>("dtype")
                                  .Attr<int64_t>("hidden")
                                  .Attr<int64_t>("gate_offset")
                                  .Attr<int64_t>("up_offset")
                                  .Attr<int64_t>("down_offset"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(flashmoe_attend, flashmoe::attend_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()  // q
                                  .Arg<xla::ffi::AnyBuffer>()                        // keys
                                  .Arg<xla::ffi::AnyBuffer>()                        // values
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()  // position
                                  .Ret<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Attr<int64_t>("isa")
                                  .Attr<int64_t>("dtype")
                                  .Attr<int64_t>("window"));
