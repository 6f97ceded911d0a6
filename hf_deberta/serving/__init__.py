"""Inference on CPUs: models prepared once, with weights laid out for the processor's matrix instructions."""
