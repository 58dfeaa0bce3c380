package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

// program is another process that is measured.
type program struct {
	cmd   *exec.Cmd
	began time.Time
	done  chan struct{} // closed when it has ended

	// mu guards what it printed.
	mu  sync.Mutex
	out bytes.Buffer
}

func (p *program) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.Write(b)
}

func (p *program) printed() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

// agent is the path of the program, built at the first call.
func (r *run) agent(ctx context.Context) (string, error) {
	if r.bin != "" {
		return r.bin, nil
	}
	r.progress("building the agent")
	bin := filepath.Join(r.dir, "fingerpost")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-tags", "grpcnotrace", "-ldflags", "-s -w", "-o", bin, "github.com/fingerpost/fingerpost/cmd/fingerpost")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	r.bin = bin
	return bin, nil
}

func startProgram(ctx context.Context, dir, bin string, args ...string) (*program, error) {
	p := &program{cmd: exec.CommandContext(ctx, bin, args...), done: make(chan struct{})}
	p.cmd.Dir = dir
	p.cmd.Stdout, p.cmd.Stderr = p, p
	p.began = time.Now()
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() { _ = p.cmd.Wait(); close(p.done) }()
	return p, nil
}

func (p *program) stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(10 * time.Second):
		_ = p.cmd.Process.Kill()
		<-p.done
	}
}

// await polls until f says so.
func (p *program) await(ctx context.Context, f func() bool) error {
	tick, limit := time.NewTicker(2*time.Millisecond), time.After(3*time.Minute)
	defer tick.Stop()
	for !f() {
		select {
		case <-tick.C:
		case <-p.done:
			return fmt.Errorf("it ended: %s", p.printed())
		case <-limit:
			return fmt.Errorf("it does not get ready: %s", p.printed())
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// ready waits until the agent answers clients, and returns the time since it
// was started. Asking it would be work for it: it is read in the log.
func (p *program) ready(ctx context.Context) (time.Duration, error) {
	err := p.says(ctx, "gate open")
	return time.Since(p.began), err
}

// says waits until the program has printed the word.
func (p *program) says(ctx context.Context, word string) error {
	return p.await(ctx, func() bool { return strings.Contains(p.printed(), word) })
}

// footprint is resident memory, in MB of 10^6 bytes.
type footprint struct{ now, peak float64 }

// settle gives the runtime a while to hand back what it does not need, and
// returns what is left, and the highest mark.
func (p *program) settle(ctx context.Context, r *run) (footprint, error) {
	d := 15 * time.Second
	if r.short {
		d = 3 * time.Second
	}
	if err := p.pause(ctx, d); err != nil {
		return footprint{}, err
	}
	return p.memory()
}

// pause waits, unless the program ends.
func (p *program) pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-p.done:
		return fmt.Errorf("it ended: %s", p.printed())
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (p *program) proc(file string) string {
	return fmt.Sprintf("/proc/%d/%s", p.cmd.Process.Pid, file)
}

func (p *program) memory() (footprint, error) {
	status, err := os.ReadFile(p.proc("status"))
	if err != nil {
		return footprint{}, err
	}
	field := func(name string) float64 {
		_, rest, _ := strings.Cut(string(status), name+":")
		text, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
		kb, _ := strconv.ParseFloat(text, 64)
		return kb * 1024 / 1e6
	}
	return footprint{now: field("VmRSS"), peak: field("VmHWM")}, nil
}

// forgetPeak makes the highest mark what is resident now (proc_pid_clear_refs(5)).
func (p *program) forgetPeak() error { return os.WriteFile(p.proc("clear_refs"), []byte("5"), 0) }

// cpu is the processor time that the program has used.
func (p *program) cpu() (time.Duration, error) {
	stat, err := os.ReadFile(p.proc("stat"))
	if err != nil {
		return 0, err
	}
	// The name of the program, in parentheses, may hold anything.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	var ticks int64
	for _, f := range fields[11:13] { // utime, stime
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, err
		}
		ticks += n
	}
	return time.Duration(ticks) * (time.Second / 100), nil // USER_HZ is 100 everywhere
}

// protobufClient is without a rate limit.
func protobufClient(kubeconfig string) (*kubernetes.Clientset, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, err
	}
	config.ContentType, config.QPS = "application/vnd.kubernetes.protobuf", -1
	return kubernetes.NewForConfig(config)
}

// beInformer is what a controller usually has: every pod in full.
func beInformer(ctx context.Context, kubeconfig string) error {
	client, err := protobufClient(kubeconfig)
	if err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	informer := factory.Core().V1().Pods().Informer()
	factory.Start(ctx.Done())
	if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		return ctx.Err()
	}
	fmt.Println("synced")
	<-ctx.Done()
	return nil
}
