"""Operations of state layers by the C++ kernels; in plain torch they are in `model_runner/states`."""
