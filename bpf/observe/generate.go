package observe

//go:generate go -C ../../tools/bpf run . ../../bpf/observe program observe.bpf.c -no-global-types -type destination -type observed -type totals
