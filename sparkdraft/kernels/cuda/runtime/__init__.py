"""What all kernels share: compilation ahead, CUDA graphs, overlapped launches, tuned tiles, and facts about them."""
