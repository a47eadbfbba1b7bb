"""The row ops beside Hugging Face, torch, FlashInfer and one read of the rows; and uniform."""


def test_row_stats(measure, case, backend, device_type):
    measure(case, backend, device_type)


def test_logits_to_probs(measure, case, backend, device_type):
    measure(case, backend, device_type)


def test_sample(measure, case, backend, device_type):
    measure(case, backend, device_type)


def test_sample_coupled(measure, case, backend, device_type):
    measure(case, backend, device_type)


def test_uniform(measure, case, backend, device_type):
    measure(case, backend, device_type)
