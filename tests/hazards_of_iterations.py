import sys
import torch, vescale_fn as vfn, collections
from torch.nn import functional as F
import test_repeated_iterations as t
from test_repeated_iterations import block, grads, layers, X, DIM
import vescale_fn.plan.tracing.repeated as r, vescale_fn.plan.tracing.trace as tr
stats=collections.Counter()
def spy(name):
    f=getattr(r.Watching,name)
    def w(self,*a,**k):
        stats[name]+=1; return f(self,*a,**k)
    setattr(r.Watching,name,w)
for n in ("_record","_make","__init__"): spy(n)
o=tr._recorded
def rec(*a,**k):
    stats["attempts"]+=1; return o(*a,**k)
tr._recorded=rec
CASES=[]
def case(f): CASES.append(f); return f

@case
def rotary_lazily_in_first():
    cache={}
    def f(params,x):
        for i,p in enumerate(params):
            if "c" not in cache: cache["c"]=torch.arange(DIM).float().cos()
            x=block(p,x*cache["c"])
        return x
    return f
@case
def rotary_in_each():
    cache={}
    def f(params,x):
        for i,p in enumerate(params):
            if i not in cache: cache[i]=torch.arange(DIM).float().cos()+i
            x=block(p,x*cache[i])
        return x
    return f
@case
def table_in_each_from_x():
    cache={}
    def f(params,x):
        cache.clear()
        for i,p in enumerate(params):
            cache[i]=torch.arange(x.shape[-1]).float().cos()
            x=block(p,x*cache[i])
        return x*cache[7]*cache[9]
    return f
@case
def skip_two():
    def f(params,x):
        hs=[x,x]
        for p in params:
            h=block(p,hs[-1])+hs[-2]
            hs.append(h)
        return hs[-1]
    return f
@case
def hs_inner():
    def f(params,x):
        hs=[]
        for p in params:
            h=torch.tanh(x@p["gate"]); hs.append(h)
            x=block(p,x)
        return x.sum()+sum(h.sum() for h in hs)
    return f
@case
def hs_inner_func():
    def f(params,x):
        hs=[]
        def layer(p,x):
            h=torch.tanh(x@p["gate"]); hs.append(h)
            return block(p,x)+h[...,:DIM]
        for p in params: x=layer(p,x)
        return x.sum()+hs[5].sum()*2+hs[12].square().sum()
    return f
@case
def inner_after_loop():
    def f(params,x):
        for p in params:
            h=torch.tanh(x@p["gate"])
            x=block(p,x)+h[...,:DIM]
        return x*h[...,:DIM]
    return f
@case
def aux_losses():
    def f(params,x):
        aux=0.
        for p in params:
            h=(x@p["gate"]).softmax(-1)
            aux=aux+h.square().mean()
            x=block(p,x)+h[...,:DIM]
        return x+aux
    return f
@case
def moe_each_fourth():
    def f(params,x):
        for i,p in enumerate(params):
            x=block(p,x)
            if i%4==3: x=x+torch.tanh(x@p["gate"])@p["down"]
        return x
    return f
@case
def moe_within():
    def f(params,x):
        for i,p in enumerate(params):
            h=F.rms_norm(x,(DIM,),p["norm"],1e-5)
            a=F.silu(h@p["gate"])*(h@p["up"])
            if i%4==3: a=a.sin()
            first,second=a.chunk(2,-1)
            a=torch.cat([second,first*.5],-1)
            x=x+(a-a.mean(-1,keepdim=True))@p["down"]/4.
        return x
    return f
@case
def no_grad_after():
    def f(params,x):
        for p in params: x=block(p,x)
        with torch.no_grad(): s=x.abs().max()
        return x/s
    return f
@case
def no_grad_reads_then_used():
    def f(params,x):
        for i,p in enumerate(params):
            x=block(p,x)
            if i==9:
                with torch.no_grad(): y=x*2
        return x+y
    return f
@case
def detach_mid():
    def f(params,x):
        for i,p in enumerate(params):
            x=block(p,x)
            if i==9: x=x.detach()
        return x
    return f
@case
def item_mid():
    def f(params,x):
        for i,p in enumerate(params):
            x=block(p,x)
            if i==9: assert x.shape[0]==3 and x.ndim==2
        return x
    return f
@case
def write_mid():
    def f(params,x):
        for i,p in enumerate(params):
            x=block(p,x)
            if i==9: x=x.clone(); x[0]=1.; x.mul_(2)
        return x
    return f
@case
def write_h_mid():
    def f(params,x):
        for i,p in enumerate(params):
            h=F.rms_norm(x,(DIM,),p["norm"],1e-5)
            a=F.silu(h@p["gate"])*(h@p["up"])
            if i==9: a.mul_(2)
            if i==12: a=a+0; a[0]+=h.sum()
            first,second=a.chunk(2,-1)
            a=torch.cat([second,first*.5],-1)
            x=x+(a-a.mean(-1,keepdim=True))@p["down"]/4.
        return x
    return f
@case
def custom_fn_mid():
    def f(params,x):
        for i,p in enumerate(params):
            x=block(p,x)
            if i in (9,10): x=t._Doubled.apply(x)/2
        return x
    return f
class D2(torch.autograd.Function):
    @staticmethod
    def forward(ctx,x):
        with torch.enable_grad(): return x*2
    @staticmethod
    def backward(ctx,g): return g*3
@case
def custom_fn_each_enable():
    def f(params,x):
        for i,p in enumerate(params): x=D2.apply(block(p,x))/2
        return x
    return f
@case
def custom_fn_inner_mid():
    def f(params,x):
        for i,p in enumerate(params):
            h=F.rms_norm(x,(DIM,),p["norm"],1e-5)
            a=F.silu(h@p["gate"])*(h@p["up"])
            if i==9: a=t._Doubled.apply(a)
            first,second=a.chunk(2,-1)
            a=torch.cat([second,first*.5],-1)
            x=x+(a-a.mean(-1,keepdim=True))@p["down"]/4.
        return x
    return f
@case
def hook_mid():
    def f(params,x):
        for i,p in enumerate(params):
            x=block(p,x)
            if i==9: x.register_hook(lambda g:g*2)
        return x
    return f
@case
def checkpoint_head():
    def f(params,x):
        for i,p in enumerate(params): x=block(p,x)
        return torch.utils.checkpoint.checkpoint(block,params[0],x,use_reentrant=False)
    return f
@case
def checkpoint_mid():
    def f(params,x):
        for i,p in enumerate(params):
            x=block(p,x) if i!=9 else torch.utils.checkpoint.checkpoint(block,p,x,use_reentrant=False)
        return x
    return f
@case
def remat_mid():
    def f(params,x):
        for i,p in enumerate(params):
            x=block(p,x) if i!=9 else vfn.remat(block)(p,x)
        return x
    return f
@case
def generator():
    def f(params,x):
        def go(x):
            for p in params:
                x=block(p,x); yield x
        return sum(y for y in go(x))
    return f
@case
def recursion():
    def f(params,x):
        def go(i,x): return x if i==len(params) else go(i+1,block(params[i],x))
        return go(0,x)
    return f
@case
def reduce():
    import functools
    return lambda params,x: functools.reduce(lambda x,p:block(p,x),params,x)
@case
def nested_loops():
    def f(params,x):
        for k in range(3):
            for p in params[6*k:6*k+6]: x=block(p,x)
            x=x*1.5+k
        return x
    return f
@case
def twice():
    def f(params,x):
        def go(x):
            for p in params: x=block(p,x)
            return x
        return go(x)+go(x*2)
    return f
@case
def inner_grad():
    def f(params,x):
        for i,p in enumerate(params):
            x=block(p,x)
            if i==9: x=x+torch.func.grad(lambda y:(y*y).sum()*.01)(x)
        return x
    return f
@case
def inner_vgrad():
    def f(params,x):
        for i,p in enumerate(params):
            x=block(p,x)
            if i==9: x=x+vfn.grad(lambda y:(y**3).sum()*.01)(x)
        return x
    return f
@case
def inner_vmap():
    def f(params,x):
        for i,p in enumerate(params):
            x=block(p,x)
            if i==9: x=torch.func.vmap(lambda y:y/(1+y.norm()))(x)
        return x
    return f
@case
def vmap_each():
    def f(params,x):
        for i,p in enumerate(params): x=torch.func.vmap(lambda y:block(p,y))(x)
        return x
    return f
@case
def autograd_grad_mid():
    def f(params,x):
        for i,p in enumerate(params):
            x=block(p,x)
            if i==9:
                x = x if not x.requires_grad else x+torch.autograd.grad((x**3).sum(),x,create_graph=True)[0]*.01
        return x
    return f
@case
def create_graph_through():
    def f(params,x):
        y=x if x.requires_grad else x
        h=y
        for i,p in enumerate(params): h=block(p,h)
        if h.requires_grad: h=h+torch.autograd.grad(h.sum(),y,create_graph=True)[0]*.01
        return h
    return f
@case
def dropout_key():
    def f(params,x):
        for i,p in enumerate(params):
            k=vfn.random.fold_in(vfn.random.key(1),i)
            x=block(p,x)*vfn.random.bernoulli(k,.9,x.shape)
        return x
    return f
@case
def autocast_each():
    def f(params,x):
        for i,p in enumerate(params):
            with torch.autocast("cpu",torch.bfloat16): x=block(p,x).float()
        return x
    return f
@case
def autocast_after():
    def f(params,x):
        for i,p in enumerate(params): x=block(p,x)
        with torch.autocast("cpu",torch.bfloat16): return (x@params[0]["gate"]).float()
    return f
@case
def scan_each():
    def f(params,x):
        for i,p in enumerate(params):
            x=block(p,x)
            x,_=vfn.scan(lambda c,y:(torch.tanh(c+y),None),x,x[None].expand(2,-1,-1))
        return x
    return f
@case
def module_buffer():
    class L(torch.nn.Module):
        def __init__(s,p):
            super().__init__(); s.p=p
        def forward(s,p,x):
            if not hasattr(s,"tab"): s.register_buffer("tab",torch.arange(DIM).float().cos(),persistent=False)
            return block(p,x*s.tab)
    ms=[L(None) for _ in range(18)]
    def f(params,x):
        for m,p in zip(ms,params): x=m(p,x)
        return x
    return f
@case
def tied():
    def f(params,x):
        for p in params: x=block({**p,"gate":params[0]["gate"]},x)
        return x
    return f
@case
def print_mid():
    def f(params,x):
        for i,p in enumerate(params):
            x=block(p,x)
            if i==9: str(x.shape); repr(type(x))
        return x
    return f
@case
def is_leaf_mid():
    def f(params,x):
        for i,p in enumerate(params):
            x=block(p,x)
            x=x*1. if x.is_leaf else x*1.0
            if i==9: assert x.grad_fn is None or x.grad_fn.name()=="MulBackward0"
        return x
    return f
@case
def returned_all():
    def f(params,x):
        out=[]
        for p in params: x=block(p,x); out.append(x)
        return sum(o*i for i,o in enumerate(out))
    return f
@case
def user_attr():
    def f(params,x):
        for i,p in enumerate(params):
            h=x@p["gate"]; h.tag=i
            x=block(p,x)+h[...,:DIM]
            assert h.tag==i
        return x*h.sum()
    return f
@case
def weakrefs():
    import weakref
    def f(params,x):
        ws=[]
        for i,p in enumerate(params):
            h=x@p["gate"]; ws.append(weakref.ref(h))
            x=block(p,x)+h[...,:DIM]
        y=ws[-1]()
        return x*y.sum()
    return f
@case
def setitem_list():
    def f(params,x):
        for i,p in enumerate(params):
            l=[x,x*2]; y=torch.stack(l); l[0]=None; l.append(5)
            x=block(p,y.sum(0)/3)
        return x
    return f
@case
def fn_exception():
    def f(params,x):
        for i,p in enumerate(params):
            try:
                h=x@p["gate"]
                if i==9: raise ValueError
                x=block(p,x)+h[...,:DIM]
            except ValueError: x=x+h[...,:DIM]
        return x
    return f
@case
def requires_grad_arg():
    def f(params,x):
        for i,p in enumerate(params):
            q=p["gate"].detach() if i==9 else p["gate"]
            x=block({**p,"gate":q},x)
        return x
    return f
@case
def data_assign():
    def f(params,x):
        for i,p in enumerate(params):
            x=block(p,x)
            if i==9:
                y=x.detach().clone(); y.data=x.detach()*2; x=x+y
        return x
    return f
if __name__=="__main__":
  only=sys.argv[1:]
  for c in CASES:
    if only and c.__name__ not in only: continue
    for wrapname,wrap in (("plain",lambda f:f),("grad",grads)):
        stats.clear()
        try:
            x64=[{k:v.double() for k,v in p.items()} for p in layers()],X.double()
            want=wrap(c())(*x64)
            j=vfn.jit(wrap(c()))
            import warnings
            with warnings.catch_warnings(record=True) as ws:
                warnings.simplefilter("always")
                got=j(*x64); got2=j(*x64)
            torch.testing.assert_close(got,want,rtol=1e-12,atol=1e-12); torch.testing.assert_close(got2,want,rtol=1e-12,atol=1e-12)
            bit=all(torch.equal(a,b) for a,b in zip(vfn.tree.leaves(got),vfn.tree.leaves(want)))
            w=[str(x.message)[:90] for x in ws]
            print("ok  ",c.__name__,wrapname,dict(stats),"" if bit else "BITS",w or "")
        except BaseException as e:
            print("FAIL",c.__name__,wrapname,dict(stats),type(e).__name__,str(e)[:300].replace("\n"," | "))
