// Runs a compiled step (graph.py): a list of kernel calls, one after the other, as a CUDA graph does on a GPU. A decoding
// step makes some 270 calls of a few microseconds each, and from Python every one of them would cost as much again.

#include <cstdint>
#include <type_traits>
#include <utility>

struct Matrix;

extern "C" {

void sd_embed(const int32_t*, int64_t, int64_t, const uint8_t*, int64_t, int64_t, const uint8_t*, int64_t, int64_t,
              const uint8_t*, int64_t, int64_t, int64_t, float*, float);
void sd_copy_rows(const float*, int64_t, float*, int64_t, const int32_t*, int64_t, int64_t, float);
void sd_linear(const Matrix*, const float*, int64_t, int64_t, float*, int64_t, int);
void sd_rms_norm(const float*, int64_t, const float*, float*, int64_t, int64_t, float);
void sd_qk_norm_rope(float*, int64_t, const int32_t*, const float*, int64_t, int64_t, int64_t, int64_t, int64_t,
                     const float*, const float*, float);
void sd_gated(const float*, int64_t, float*, int64_t, int64_t, int64_t, float);
void sd_kv_write(const float*, int64_t, int64_t, const float*, int64_t, int64_t, float*, float*, const int32_t*,
                 int64_t, int64_t, int64_t, int64_t);
void sd_paged_attention(const void*);
void sd_tq_write(const void*);
void sd_find_pages(const int32_t*, const int32_t*, const int32_t*, int32_t*, int32_t*, int64_t, int64_t, int64_t,
                   int64_t);
void sd_make_rows(const int32_t*, const int32_t*, const int32_t*, const int32_t*, int64_t, int64_t, int64_t, int64_t,
                int64_t, int32_t*);
void sd_unit_rms(const float*, int64_t, int64_t, float*, int64_t, int64_t, int64_t, float);
void sd_add_normed(float*, int64_t, const float*, int64_t, const float*, int64_t, int64_t, float, float);
void sd_softcap(float*, int64_t, float);
void sd_route(const float*, int64_t, int64_t, int64_t, int64_t, const float*, int32_t*, float*);
void sd_experts(const void*);
void sd_find_states(const int32_t*, const int32_t*, const int32_t*, const int32_t*, int32_t*, int64_t, int64_t,
                    int64_t);
void sd_causal_conv(const void*);
void sd_delta_rule(const void*);
void sd_gated_norm(const float*, int64_t, const float*, int64_t, const float*, float*, int64_t, int64_t, int64_t,
                   float);
void sd_sigmoid_gate(float*, int64_t, const float*, int64_t, int64_t, int64_t, int64_t);

struct Recorded {  // mirrored in graph.py
    int64_t kernel;
    int64_t a[14];   // pointers and integers, in the kernel's order
    double real[2];  // its floating-point arguments, which come last
};

}  // extern "C"

namespace {

template <auto KERNEL>
struct Call;

template <class... A, void (*KERNEL)(A...)>
struct Call<KERNEL> {
    static constexpr int INTEGERS = (0 + ... + int(!std::is_floating_point_v<A>));

    template <class T>
    static T argument(const Recorded& call, int i) {
        if constexpr (std::is_pointer_v<T>) return reinterpret_cast<T>(call.a[i]);
        if constexpr (std::is_integral_v<T>) return T(call.a[i]);
        if constexpr (std::is_floating_point_v<T>) return T(call.real[i - INTEGERS]);
    }
    template <int... I>
    static void run_with(const Recorded& call, std::integer_sequence<int, I...>) {
        KERNEL(argument<A>(call, I)...);
    }
    static void run(const Recorded& call) { run_with(call, std::make_integer_sequence<int, sizeof...(A)>{}); }
};

using Run = void (*)(const Recorded&);
constexpr Run KERNELS[] = {  // in the order of graph.py
    Call<sd_embed>::run,           Call<sd_copy_rows>::run,   Call<sd_linear>::run,     Call<sd_rms_norm>::run,
    Call<sd_qk_norm_rope>::run,    Call<sd_gated>::run,       Call<sd_kv_write>::run,   Call<sd_paged_attention>::run,
    Call<sd_find_pages>::run,      Call<sd_make_rows>::run,   Call<sd_unit_rms>::run,   Call<sd_add_normed>::run,
    Call<sd_softcap>::run,         Call<sd_route>::run,       Call<sd_experts>::run,    Call<sd_find_states>::run,
    Call<sd_causal_conv>::run,     Call<sd_delta_rule>::run,  Call<sd_gated_norm>::run, Call<sd_sigmoid_gate>::run,
    Call<sd_tq_write>::run,
};

}  // namespace

extern "C" void sd_replay(const Recorded* calls, int64_t count) {
    for (int64_t i = 0; i < count; ++i) KERNELS[calls[i].kernel](calls[i]);
}
