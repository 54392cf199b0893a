// Runs a recorded list of kernel calls one after the other: what a CUDA graph is to a GPU.
// A decoding step makes some 270 calls of a few microseconds each, and coming from Python every one of them costs as
// much again; recorded once (graph.py), the step is a single call. What is in the list is Python's business.

#include <cstdint>

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

enum Kernel : int64_t {
    EMBED, COPY_ROWS, LINEAR, RMS_NORM, QK_NORM_ROPE, GATED, KV_WRITE, PAGED_ATTENTION, FIND_PAGES, MAKE_ROWS,
    UNIT_RMS, ADD_NORMED, SOFTCAP, ROUTE, EXPERTS, FIND_STATES, CAUSAL_CONV, DELTA_RULE, GATED_NORM,
    SIGMOID_GATE
};

struct Recorded {  // both mirrored in graph.py
    int64_t kernel;
    int64_t a[14];   // pointers and integers, in the kernel's order
    double real[2];  // its floating-point arguments, which come last
};

}  // extern "C"

namespace {

template <class T>
T* at(int64_t address) {
    return reinterpret_cast<T*>(address);
}

void run(const Recorded& c) {
    const int64_t* a = c.a;
    switch (c.kernel) {
        case EMBED:
            return sd_embed(at<int32_t>(a[0]), a[1], a[2], at<uint8_t>(a[3]), a[4], a[5], at<uint8_t>(a[6]), a[7],
                            a[8], at<uint8_t>(a[9]), a[10], a[11], a[12], at<float>(a[13]), float(c.real[0]));
        case COPY_ROWS:
            return sd_copy_rows(at<float>(a[0]), a[1], at<float>(a[2]), a[3], at<int32_t>(a[4]), a[5], a[6],
                                float(c.real[0]));
        case LINEAR:
            return sd_linear(at<Matrix>(a[0]), at<float>(a[1]), a[2], a[3], at<float>(a[4]), a[5], int(a[6]));
        case RMS_NORM:
            return sd_rms_norm(at<float>(a[0]), a[1], at<float>(a[2]), at<float>(a[3]), a[4], a[5], float(c.real[0]));
        case QK_NORM_ROPE:
            return sd_qk_norm_rope(at<float>(a[0]), a[1], at<int32_t>(a[2]), at<float>(a[3]), a[4], a[5], a[6], a[7],
                                   a[8], at<float>(a[9]), at<float>(a[10]), float(c.real[0]));
        case GATED:
            return sd_gated(at<float>(a[0]), a[1], at<float>(a[2]), a[3], a[4], a[5], float(c.real[0]));
        case KV_WRITE:
            return sd_kv_write(at<float>(a[0]), a[1], a[2], at<float>(a[3]), a[4], a[5], at<float>(a[6]),
                               at<float>(a[7]), at<int32_t>(a[8]), a[9], a[10], a[11], a[12]);
        case PAGED_ATTENTION:
            return sd_paged_attention(at<void>(a[0]));
        case FIND_PAGES:
            return sd_find_pages(at<int32_t>(a[0]), at<int32_t>(a[1]), at<int32_t>(a[2]), at<int32_t>(a[3]),
                                 at<int32_t>(a[4]), a[5], a[6], a[7], a[8]);
        case MAKE_ROWS:
            return sd_make_rows(at<int32_t>(a[0]), at<int32_t>(a[1]), at<int32_t>(a[2]), at<int32_t>(a[3]), a[4], a[5],
                              a[6], a[7], a[8], at<int32_t>(a[9]));
        case UNIT_RMS:
            return sd_unit_rms(at<float>(a[0]), a[1], a[2], at<float>(a[3]), a[4], a[5], a[6], float(c.real[0]));
        case ADD_NORMED:
            return sd_add_normed(at<float>(a[0]), a[1], at<float>(a[2]), a[3], at<float>(a[4]), a[5], a[6],
                                 float(c.real[0]), float(c.real[1]));
        case SOFTCAP:
            return sd_softcap(at<float>(a[0]), a[1], float(c.real[0]));
        case ROUTE:
            return sd_route(at<float>(a[0]), a[1], a[2], a[3], a[4], at<float>(a[5]), at<int32_t>(a[6]),
                            at<float>(a[7]));
        case EXPERTS:
            return sd_experts(at<void>(a[0]));
        case FIND_STATES:
            return sd_find_states(at<int32_t>(a[0]), at<int32_t>(a[1]), at<int32_t>(a[2]), at<int32_t>(a[3]),
                                  at<int32_t>(a[4]), a[5], a[6], a[7]);
        case CAUSAL_CONV:
            return sd_causal_conv(at<void>(a[0]));
        case DELTA_RULE:
            return sd_delta_rule(at<void>(a[0]));
        case GATED_NORM:
            return sd_gated_norm(at<float>(a[0]), a[1], at<float>(a[2]), a[3], at<float>(a[4]), at<float>(a[5]), a[6],
                                 a[7], a[8], float(c.real[0]));
        case SIGMOID_GATE:
            return sd_sigmoid_gate(at<float>(a[0]), a[1], at<float>(a[2]), a[3], a[4], a[5], a[6]);
    }
}

}  // namespace

extern "C" void sd_replay(const Recorded* calls, int64_t count) {
    for (int64_t i = 0; i < count; ++i) run(calls[i]);
}
