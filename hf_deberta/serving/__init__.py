"""Inference on CPUs: models prepared once, with weights packed for the processor's matrix instructions."""
