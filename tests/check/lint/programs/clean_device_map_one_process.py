from transformers import AutoModelForCausalLM, AutoTokenizer

name = "meta-llama/Llama-3.1-70B"
model = AutoModelForCausalLM.from_pretrained(name, device_map="auto")
tokenizer = AutoTokenizer.from_pretrained(name)
print(tokenizer.decode(model.generate(**tokenizer("Hello", return_tensors="pt").to(model.device))[0]))
