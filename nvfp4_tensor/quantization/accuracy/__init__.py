"""Methods that make a quantized model more accurate: GPTQ, weighted searches, folding, sensitivity."""
