package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
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

func buildAgent(ctx context.Context, bin string) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-tags", "grpcnotrace", "-ldflags", "-s -w", "-o", bin, "github.com/fingerpost/fingerpost/cmd/fingerpost")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

func startProgram(ctx context.Context, dir, bin string, env []string, args ...string) (*program, error) {
	p := &program{cmd: exec.CommandContext(ctx, bin, args...), done: make(chan struct{})}
	p.cmd.Dir, p.cmd.Env = dir, append(os.Environ(), env...)
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
func (p *program) settle(ctx context.Context) (footprint, error) {
	select {
	case <-time.After(15 * time.Second):
	case <-p.done:
		return footprint{}, errors.New(p.printed())
	case <-ctx.Done():
		return footprint{}, ctx.Err()
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
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

// stockInformer is what a controller usually has: every pod in full.
func stockInformer(ctx context.Context, kubeconfig string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	config.ContentType = "application/vnd.kubernetes.protobuf"
	client, err := kubernetes.NewForConfig(config)
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
