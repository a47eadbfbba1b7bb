"""verify_chain beside Hugging Face, FlashInfer, the bytes of vLLM's rule, one read of the rows."""


def test_verify_chain(measure, case, backend, device_type):
    measure(case, backend, device_type)
