# accelerate launch --num_processes 2 this.py
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

bnb = BitsAndBytesConfig(load_in_4bit=True)
model = AutoModelForCausalLM.from_pretrained(  # expect: quantised-model-on-many-devices
    "meta-llama/Llama-3.1-8B", quantization_config=bnb, device_map="auto"
)
SFTTrainer(model=model, args=SFTConfig(output_dir="out")).train()
