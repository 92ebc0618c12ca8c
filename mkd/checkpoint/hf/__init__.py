"""Hugging Face folders in and out, slice by slice.

hf_names.py                      which slices of tensors make a parameter (tables: mkd/families)
hf_codes.py                      codes and scales of quantised matrices, as files hold them
hf_quantised.py                  FP8 and MXFP4 tensors, dequantised by slice
hf_compressed.py                 codes and scales of compressed-tensors, dequantised by slice
hf_stacked.py                    tensors of all experts of a layer, read expert by expert
hf_tower.py                      names of models with images, and the parameters of their towers
hf_adapters.py                   first values of adapters, and weights with adapters added
hf_check.py                      compares a folder's tensors with its config.json
hf_causes.py                     one cause of many differences: prefixes, sizes, numbers of layers
hf_renamed.py                    tensors under other names: which look like which
hf_hub.py                        finds the folder of a model, here or on the hub, without torch
hf_reader.py                     opens a folder and reads slices of its tensors
hf_weights.py                    fills a model part with the slices of its rank
hf_assets.py                     configuration, tokenizer and templates beside the weights
hf_changes.py                    what a run changes in them: image processor, stop ids, tokenizer's class
hf_shards.py                     the layout of the written files
hf_rounded.py                    matrices of a student that are rounded, and how its export stores them
hf_carried.py                    tensors that mkd does not train, and an export copies
hf_folder.py                     what a folder holds, and how a new model replaces it
hf_writer.py                     collects tensors from all ranks and writes them
peft_writer.py                   adapters, as PEFT loads them
"""
